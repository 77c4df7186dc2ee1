"""Connections that send slowly, nothing, or without end."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from bigmodel.server.http import client_limits
from bigmodel.server.http.run import server_config
from tests.server.http.test_run import process, wait_ready
from tests.server.live import serving, tiny_app


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that waits for a request for a tenth of a second."""
    monkeypatch.setattr(client_limits, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(client_limits, "BODY_SECONDS", 0.1)
    with serving(tiny_app()) as url:
        yield url


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


BODY = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: a\r\n", BODY])
def test_a_connection_without_a_request_is_closed(impatient: str, sent: bytes) -> None:
    with connected(impatient) as client:
        client.sendall(sent)
        assert client.recv(100) == b""  # closed by the server


@pytest.mark.slow
@pytest.mark.parametrize(("path", "whole"), [("/v1/files", True), ("/v1/completions", False)])
def test_an_upload_may_take_longer_while_its_bytes_come(
    impatient: str, monkeypatch: pytest.MonkeyPatch, path: str, whole: bool
) -> None:
    monkeypatch.setattr(client_limits, "UPLOAD_BYTES_PER_SECOND", 10)  # a busy machine is no slow client
    form = httpx.Request("POST", impatient, data={"purpose": "batch"}, files={"file": b"x" * 1000}).read()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(form)}\r\n"
    kind = f"Content-Type: multipart/form-data; boundary={form[2:34].decode()}\r\n\r\n"
    with connected(impatient) as client:
        client.sendall((head + kind).encode() + form[:300])
        try:
            for begin in range(300, len(form), 300):
                time.sleep(0.08)  # for all of them longer than a tenth of a second
                client.sendall(form[begin : begin + 300])
            answer = client.recv(100)
        except ConnectionError:
            answer = b""
    assert (b" 200 " in answer) == whole


@pytest.mark.slow
def test_an_upload_that_stops_is_closed_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "BODY_SECONDS", 0.1)
    app = tiny_app()
    head = b"POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n"
    with serving(app) as url, connected(url) as client:
        client.sendall(head + b"Content-Type: multipart/form-data; boundary=a\r\n\r\n--a\r\n")
        assert client.recv(100) == b""
        files = app.state.server.batches.files
        while list(files.path("x").parent.iterdir()):
            time.sleep(0.01)
        assert files.total_bytes == 0


@pytest.mark.slow
def test_an_endless_header_is_refused(impatient: str) -> None:
    with connected(impatient) as client:
        try:
            client.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 4 * client_limits.HEADER_BYTES)
            answer = client.recv(100)
        except ConnectionError:  # closed with bytes of ours unread
            answer = b""
        assert answer == b"" or b" 400 " in answer


def test_idle_and_slow_connections_do_not_affect_others(url: str) -> None:
    with ExitStack() as stack:
        for number in range(200):
            client = stack.enter_context(connected(url))
            if number % 2:
                client.sendall(b"GET /hea")
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_connections_beyond_the_bound_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "CONNECTIONS", 5)
    with serving(tiny_app()) as url, ExitStack() as stack:
        clients = [stack.enter_context(connected(url)) for _ in range(5)]
        with connected(url) as more, pytest.raises(ConnectionResetError):
            if more.recv(1) == b"":
                raise ConnectionResetError
        clients[0].sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 200 " in clients[0].recv(100)


@pytest.mark.slow
def test_an_address_has_a_share_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "CONNECTIONS_OF_AN_ADDRESS", 5)
    with serving(tiny_app()) as url, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connected(url))
        with connected(url) as more, pytest.raises(ConnectionResetError):
            if more.recv(1) == b"":
                raise ConnectionResetError
        parts = urlsplit(url)
        other = socket.create_connection((parts.hostname, parts.port), timeout=30, source_address=("127.0.0.2", 0))
        with other:
            other.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 200 " in other.recv(100)


@pytest.mark.slow
def test_400_idle_and_400_slow_connections_leave_a_process_as_it_was() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    with process(0, 30) as (_, url), ExitStack() as stack:
        wait_ready(url)
        asked = {"model": "tiny", "prompt": "the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        before = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"]
        for number in range(800):
            client = stack.enter_context(connected(url))
            if number % 2:
                client.sendall([b"GET /hea", BODY, b"POST /tokenize HTTP/1.1\r\nX: " + b"a" * 30_000][number % 3])
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            assert httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"] == before


@pytest.mark.anyio
async def test_others_have_their_turns_between_a_few_of_very_many_chunks() -> None:
    pieces: list[bytes] = []

    async def note_pieces(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            pieces.append(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    config = server_config(note_pieces, log_level="warning")
    config.load()
    loop = asyncio.get_running_loop()
    made = ServerState()
    server = await loop.create_server(lambda: client_limits.BoundedProtocol(config, made, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        asked = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
        writer.write(asked + (head + b"1\r\n{\r\n" * 2000 + b"0\r\n\r\n") * 2 + asked)
        answers = b""
        while answers.count(b" 204 ") < 4:
            answers += await reader.read(4096)
        writer.close()
    assert b"".join(pieces) == b"{" * 4000
    assert max(map(len, pieces)) <= client_limits.EVENTS_AT_ONCE
