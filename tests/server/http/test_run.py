"""Signals, draining and exit codes of a server process.

What is asked every second does not fill the log; what a client did, and what failed, is there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from bigmodel.errors import ServeError
from bigmodel.server.http import run as run_module
from bigmodel.server.http.run import DrainingServer, WithoutPolling, bind, server_config, url
from bigmodel.server.http.state import ServerState, Settings
from tests.preloaded import Program
from tests.server.live import tiny_app


@contextlib.contextmanager
def process(
    delay: float, drain_timeout: float, loading: str = "", *, linger: float = 0, folder: str = ""
) -> Iterator[tuple[Child, str]]:
    """A process that serves, and its address."""
    arguments = ["-m", "tests.server.serve_tiny", delay, drain_timeout, loading, linger, folder]
    with tempfile.NamedTemporaryFile() as log:
        program = Program(
            arguments, os.environ, stderr=log.fileno(), modules=["bigmodel.server.http.run", "tests.server.tiny"]
        )
        try:
            assert program.stdout is not None
            yield Child(program, Path(log.name)), f"http://127.0.0.1:{int(program.stdout.readline())}"
        finally:
            program.kill()


@dataclass(frozen=True)
class Child:
    process: Program
    log: Path

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """The exit code. Raises TimeoutExpired if it has not ended."""
        return self.process.wait(seconds)


def wait_ready(url: str) -> None:
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.02)


def request(prompt: object = "the cat", **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "ignore_eos": True, "seed": 1, **fields}


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish_and_exits_zero() -> None:
    with process(0.02, 30) as (child, url):
        wait_ready(url)
        with httpx.stream("POST", f"{url}/v1/completions", json=request(max_tokens=20, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert child.wait(60) == 0


def test_a_signal_gives_up_what_batches_have_answered_before_anything_is_waited_for() -> None:
    state = ServerState(Settings("tiny"))
    left: list[bool] = []
    state.batches = SimpleNamespace(leave_soon=lambda: left.append(server.should_exit))  # type: ignore[assignment]
    server = DrainingServer(server_config(FastAPI()), state)
    server.handle_exit(signal.SIGTERM, None)
    while not server.should_exit:
        time.sleep(0.001)
    assert left == [False]


def test_objects_are_collected_again_once_the_server_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that are exempt are not freed when the process ends, and libraries report theirs as leaks."""

    def serve(server: DrainingServer, sockets: list[socket.socket]) -> None:
        gc.freeze()  # as when a model is loaded
        server.should_exit = True

    monkeypatch.setattr(DrainingServer, "run", serve)
    for of_the_process in ("use_few_arenas", "_allow_files"):
        monkeypatch.setattr(run_module, of_the_process, lambda *_: None)
    with bind("127.0.0.1", 0) as listener:
        assert run_module.run(tiny_app(), listener) == 0
    assert not gc.get_freeze_count()


@pytest.mark.slow
def test_clients_that_are_stuck_are_cut_in_one_line() -> None:
    with process(0.01, 0.1) as (child, url):
        wait_ready(url)
        half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as stuck:
            stuck.sendall(half)
            while not httpx.get(f"{url}/health").is_success:
                time.sleep(0.01)
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0
        assert child.log.read_text().splitlines() == [
            "1 connections are cut: their clients neither sent nor read in time"
        ]


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_says_so() -> None:
    with process(0.05, 60) as (child, url):
        wait_ready(url)
        with httpx.stream("POST", f"{url}/v1/completions", json=request(max_tokens=900, stream=True)) as stream:
            lines = stream.iter_lines()  # dropping it would close the connection
            next(lines)
            child.send_signal(signal.SIGINT)
            while httpx.get(f"{url}/ready").json()["status"] != "draining":
                time.sleep(0.01)
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 130
        assert child.log.read_text().splitlines() == ["SIGINT again: ending at once"]


@pytest.mark.slow
def test_memory_is_returned_while_large_requests_are_answered_and_once_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ServerState(Settings("tiny"))
    server = DrainingServer(server_config(FastAPI()), state)
    returned: list[bool] = []
    pauses = iter([False, True, True, False, False, False])  # whether a large request is there

    def pause(_: float) -> None:
        wanted = next(pauses, None)
        if wanted is None:
            server.should_exit = True
        elif wanted and state.large.idle:
            assert state.large.take("a client")
        elif not wanted and not state.large.idle:
            state.large.give_back("a client")

    monkeypatch.setattr(run_module, "time", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(run_module, "return_freed_memory", lambda: returned.append(state.large.idle))
    server.trim()
    assert returned == [False, False, True]


@pytest.mark.slow
def test_no_new_requests_while_draining() -> None:
    with process(0.05, 60) as (child, url):
        wait_ready(url)

        def run() -> None:
            with contextlib.suppress(httpx.TransportError):
                httpx.post(f"{url}/v1/completions", json=request(max_tokens=900), timeout=60)

        running = threading.Thread(target=run)
        running.start()
        while httpx.get(f"{url}/plan").json()["engine"]["running"] == 0:
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/ready").json()["status"] != "draining":
            time.sleep(0.01)
        refused = httpx.post(f"{url}/v1/completions", json=request(max_tokens=1))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert httpx.get(f"{url}/health").status_code == 200
        child.send_signal(signal.SIGTERM)
        running.join(60)
        assert child.wait(60) == 0


@pytest.mark.slow
def test_requests_are_ended_at_the_drain_timeout() -> None:
    with process(0.05, 0.2) as (child, url):
        wait_ready(url)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=request(max_tokens=900, stream=True), timeout=30
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "engine_failed" in rest[-1]
        assert child.wait(60) == 0


@pytest.mark.slow
def test_an_engine_failure_fails_its_requests_and_the_process() -> None:
    with process(0, 1, linger=100) as (child, url):
        wait_ready(url)
        answer = httpx.post(f"{url}/v1/completions", json=request([9, 9, 9], max_tokens=3), timeout=30)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.json()["error"]["type"] == "server_error"
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.post(f"{url}/v1/completions", json=request(max_tokens=1)).status_code == 503
        child.send_signal(signal.SIGTERM)  # it is not waited for that long
        assert child.wait(60) == 1


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_process() -> None:
    with process(0, 1, "broken") as (child, _):
        assert child.wait(60) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_while_loading_ends_the_process_in_order(number: int, code: int) -> None:
    with process(0, 1, "endless") as (child, url):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready").json()["progress"] == 0.25:
                    break
        child.send_signal(number)
        assert child.wait(60) == code
        assert child.log.read_text() == ""


def test_an_address_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServeError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize("host", ["", "[]"])
def test_an_empty_host_does_not_listen_on_every_address(host: str) -> None:
    with pytest.raises(ServeError, match="the host is empty"):
        bind(host, 0)


@needs_ipv6
def test_an_address_of_ipv6_may_be_in_brackets() -> None:
    for host in ("::1", "[::1]"):
        with bind(host, 0) as listener:
            assert listener.getsockname()[0] == "::1"


@needs_ipv6
def test_a_name_is_looked_up_and_ipv4_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ((socket.AF_INET6, 1, 6, "", ("::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 0)))
    for known, expected in (([first, second], "127.0.0.1"), ([first], "::1")):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, known=known, **__: known)
        with bind("some-host", 0) as listener:
            assert listener.getsockname()[0] == expected


@pytest.mark.parametrize("host", ["nowhere.invalid", "x" * 70, "a..b", "http://localhost"])
def test_a_host_without_an_address_is_named(host: str) -> None:
    with pytest.raises(ServeError, match="cannot listen on"):
        bind(host, 0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_invalid_port_is_refused(port: int) -> None:
    with pytest.raises(ServeError, match=f"{port} is no port"):
        bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("[::1]", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_an_address_is_printed_as_a_url(host: str, shown: str) -> None:
    assert url(host, 80) == shown


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger("tests.access")
    made.setLevel(logging.INFO)
    made.addFilter(only := WithoutPolling())
    yield made
    made.removeFilter(only)


def logged(logger: logging.Logger, path: str, status: int) -> bool:
    """Whether a request is in the log, written as uvicorn writes it."""
    arguments = ("127.0.0.1:9", "GET", path, "1.1", status)
    return bool(logger.filter(logger.makeRecord(logger.name, logging.INFO, "", 0, "%s %s %s %s %s", arguments, None)))


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/plan?parts=false"])
def test_polling_requests_are_logged_only_if_they_fail(logger: logging.Logger, path: str) -> None:
    assert not logged(logger, path, 200)
    assert logged(logger, path, 503)


@pytest.mark.parametrize("path", ["/", "/v1/completions", "/v1/models", "/planet"])
def test_requests_of_clients_are_logged(logger: logging.Logger, path: str) -> None:
    assert logged(logger, path, 200)


def test_every_request_is_logged_at_level_debug(logger: logging.Logger) -> None:
    logger.setLevel(logging.DEBUG)
    assert logged(logger, "/health", 200)
