"""Two replicas behind one address: the same answers, streams included, and a clean end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bigmodel.errors import ServeError
from server.replicas import resources, run_replicas

ROOT = Path(__file__).parents[2]


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ServeError, match="pip install"):
        run_replicas(lambda: None, replicas=2, host="", port=0, max_requests=1, drain_timeout=1)  # type: ignore[arg-type, return-value]


def test_replicas_share_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert resources(2) == {"num_cpus": 1}
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert resources(2) == {"num_cpus": 1, "num_gpus": 2}


@pytest.mark.slow
def test_two_replicas_answer_alike_and_stop_on_a_signal() -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.server.serve_replicas"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        url = f"http://127.0.0.1:{child.stdout.readline().strip()}"
        end = time.monotonic() + 100
        ready = False
        while not ready and time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                ready = httpx.get(f"{url}/ready").status_code == 200
            time.sleep(0.2)
        assert ready
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 12, "seed": 1, "ignore_eos": True}
        texts = {
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"] for _ in range(6)
        }
        assert len(texts) == 1
        streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60).text
        assert streamed.endswith("data: [DONE]\n\n")
        bad = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 9}, timeout=60)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "temperature")
        # Each replica counts for itself, and either may be asked; together they have answered all seven.
        assert sum({answered(url) for _ in range(24)}) == 7
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def answered(url: str) -> float:
    """What one of the replicas says that it has answered."""
    found = re.search(r'^bigmodel_requests_total{outcome="ok"} (\S+)$', httpx.get(f"{url}/metrics").text, re.M)
    return 0.0 if found is None else float(found[1])
