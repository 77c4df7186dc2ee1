"""Replicas on two machines behind one address: the same answers, streams included, one total, and a clean end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import ServeError
from bigmodel.server.replicas.run import ClusterMachine, resources, run_replicas

ROOT = Path(__file__).parents[3]


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ServeError, match="pip install"):
        run_replicas(lambda: None, replicas=2, host="", port=0, max_requests=1, drain_timeout=1)  # type: ignore[arg-type, return-value]


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two machines."""
    pytest.importorskip("ray", reason="ray is not installed")
    with child("tests.server.ray_cluster") as process:
        yield line_of(process)
        process.communicate(timeout=60)  # closes its standard input
        assert process.returncode == 0


@pytest.mark.slow
def test_replicas_on_two_machines_answer_alike_behind_one_address_and_stop_on_a_signal(cluster: str) -> None:
    with child("tests.server.serve_replicas", cluster) as process:
        url = f"http://127.0.0.1:{line_of(process)}"
        machines: set[str] = set()
        wait(lambda: len(machines) == 2, lambda: machines.update(machine_of(url)))
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 12, "seed": 1, "ignore_eos": True}
        texts = {
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"] for _ in range(6)
        }
        assert len(texts) == 1
        streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60).text
        assert streamed.endswith("data: [DONE]\n\n")
        bad = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 9}, timeout=60)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "temperature")
        # Whichever replica is asked tells what both have done, as soon as the other has said so.
        wait(lambda: [counted(url, 'requests_total{outcome="ok"}') for _ in range(4)] == [7] * 4)
        assert counted(url, "generated_tokens_total") == 7 * 12
        shown = httpx.get(f"{url}/plan").json()
        assert shown["engine"]["generated_tokens"] == 7 * 12
        assert [each["engine"]["state"] for each in shown["replicas"]] == ["running"] * 2
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@contextlib.contextmanager
def child(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs ``module``; killed if it has not ended by then."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait(reached: Callable[[], bool], step: Callable[[], object] = lambda: None) -> None:
    """Repeat ``step`` until ``reached``."""
    end = time.monotonic() + 100
    while not reached():
        assert time.monotonic() < end
        step()
        time.sleep(0.05)


def machine_of(url: str) -> list[str]:
    """Which machine answered; none while nothing does."""
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.get(f"{url}/machine")
        return [answer.json()] if answer.status_code == 200 else []
    return []


def counted(url: str, name: str) -> float:
    """A number of /metrics; 0 while it is not there."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(f"bigmodel_{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0


@pytest.mark.parametrize(
    ("machines", "replicas", "expected"),
    [
        ([ClusterMachine(2)], 2, {"num_cpus": 1}),
        ([ClusterMachine(8)], 2, {"num_cpus": 4}),
        ([ClusterMachine(8), ClusterMachine(2)], 2, {"num_cpus": 4}),  # both on the large one
        ([ClusterMachine(4), ClusterMachine(4)], 2, {"num_cpus": 4}),
        ([ClusterMachine(16, 4)], 2, {"num_cpus": 8, "num_gpus": 2}),
        ([ClusterMachine(16, 1), ClusterMachine(16, 1)], 2, {"num_cpus": 16, "num_gpus": 1}),  # one on each machine
        ([ClusterMachine(16, 1)], 2, {"num_cpus": 1, "num_gpus": 0.5}),
        ([ClusterMachine(16, 1), ClusterMachine(16, 1)], 3, {"num_cpus": 1, "num_gpus": 0.5}),
    ],
)
def test_a_clusters_processors_are_divided_evenly(
    machines: list[ClusterMachine], replicas: int, expected: dict[str, float]
) -> None:
    assert resources(machines, replicas) == expected


@given(
    st.lists(st.builds(ClusterMachine, st.integers(8, 64), st.integers(0, 8)), min_size=1, max_size=5),
    st.integers(1, 8),
)
def test_every_replica_fits_a_machine(machines: list[ClusterMachine], replicas: int) -> None:
    share = resources(machines, replicas)
    cpus, gpus = share["num_cpus"], share.get("num_gpus", 0)
    places = sum(
        int(min(machine.cpus // cpus, machine.gpus / gpus + 1e-9 if gpus else machine.cpus)) for machine in machines
    )
    assert places >= replicas
