"""`bigmodel serve` as its supervisor sees it: what it says, how it ends, and with which code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bigmodel.cli.main import run
from tests.cli.serve_command import BREAKS
from tests.preloaded import Program
from tests.server.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def quantised(folder: Path) -> Path:
    """The same model, quantised by the command."""
    path = folder.parent / "quantised" / "tiny"
    path.parent.mkdir()
    assert run(["quantize", str(folder), str(path), "--to", "int8"]) == 0
    return path


class Served:
    """A process that serves, what it has said so far, and the address that it named."""

    def __init__(self, process: Program, log: Path, wait: bool) -> None:
        self.process = process
        self._log = log
        found = None
        while found is None:
            assert process.poll() is None, self.said()
            time.sleep(0.01)
            found = re.search(r"^serving tiny on (http://127\.0\.0\.1:\d+)$", self.said(), re.M)
        self.url = found[1]
        while wait and self.status("ready") != 200:
            time.sleep(0.02)

    def said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def status(self, path: str) -> int | None:
        """The status of a GET; None where nobody listens."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/{path}").status_code
        return None

    def complete(self, prompt: object = "the cat", **fields: object) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "ignore_eos": True, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def code(self) -> int:
        """The exit code, once the process has ended."""
        return self.process.wait(60)


@contextlib.contextmanager
def serving(
    folder: Path, log: Path, *arguments: str, breaks: bool = False, wait: bool = True, memory: str = "cpu=1GiB"
) -> Iterator[Served]:
    """A process of `bigmodel serve`, once it is ready, or (not ``wait``) once it has said where it serves."""
    given = ["serve", folder, "--port", "0", "--max-memory", memory, *arguments]
    command = ["-m", "tests.cli.serve_command", "breaks" if breaks else "sound", *given]
    with log.open("w") as output:
        process = Program(
            command,
            os.environ,
            stdout=output.fileno(),
            stderr=output.fileno(),
            modules=["bigmodel.cli.serve", "bigmodel.server.http.run", "tests.server.tiny"],
        )
    try:
        yield Served(process, log, wait)
    finally:
        process.kill()


@pytest.mark.slow
def test_an_engine_failure_is_an_error_for_clients_and_health_and_exit_code_1(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log", breaks=True) as served:
        assert served.complete(max_tokens=2).status_code == 200
        other: list[httpx.Response] = []
        waits = threading.Thread(target=lambda: other.append(served.complete(max_tokens=900)))
        waits.start()
        while httpx.get(f"{served.url}/plan?parts=false").json()["engine"]["running"] == 0:
            time.sleep(0.01)
        answer = served.complete(BREAKS, max_tokens=3)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        assert served.status("health") == 503
        waits.join(60)
        assert other[0].status_code == 500  # a request beside it is not left hanging
        served.process.send_signal(signal.SIGTERM)
        assert served.code() == 1
        assert "error: secret detail of the failure" in served.said()  # for whoever runs it, not for clients


@pytest.mark.slow
def test_a_running_request_of_a_quantised_model_finishes_after_sigterm_and_the_exit_code_is_0(
    quantised: Path, tmp_path: Path
) -> None:
    with serving(quantised, tmp_path / "log", "--drain-timeout", "60") as served:
        body = {"model": "tiny", "prompt": "the cat", "ignore_eos": True, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert served.code() == 0
        assert "Traceback" not in served.said()
