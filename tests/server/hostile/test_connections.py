"""Connections that send slowly, nothing, or without end."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from bigmodel.server.http import client_limits
from bigmodel.server.http.run import server_config
from tests.server.http.test_run import process, wait_ready
from tests.server.live import MODEL, engine_of, serving, tiny_app


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


@pytest.mark.slow
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


@asynccontextmanager
async def bare(app: ASGIApp, **options: Any) -> AsyncIterator[tuple[str, int]]:
    """A server of one application, as it is; gives its address."""
    config = server_config(app, log_level="warning", **options)  # type: ignore[arg-type]
    config.load()
    made = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: client_limits.BoundedProtocol(config, made, {}), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()
        for connection in list(made.connections):
            connection.transport.abort()


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

    async with bare(note_pieces) as address:
        reader, writer = await asyncio.open_connection(*address)
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        asked = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
        writer.write(asked + (head + b"1\r\n{\r\n" * 2000 + b"0\r\n\r\n") * 2 + asked)
        answers = b""
        while answers.count(b" 204 ") < 4:
            answers += await reader.read(4096)
        writer.close()
    assert b"".join(pieces) == b"{" * 4000
    assert max(map(len, pieces)) <= client_limits.EVENTS_AT_ONCE


# --- clients that do not read ------------------------------------------------------------------------------


@pytest.fixture
def unpatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes wait for a tenth of a second for who is to read them, and few of them beside the server's own memory."""
    monkeypatch.setattr(client_limits, "UNREAD_SECONDS", 0.1)
    monkeypatch.setattr(client_limits, "READ_BYTES_PER_SECOND", 1 << 30)
    monkeypatch.setattr(client_limits, "UNSENT_BYTES", 4096)


def narrow(address: tuple[str, int]) -> socket.socket:
    """A connection of a client whose system takes few bytes that it does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect(address)
    return client


def rest(client: socket.socket) -> bytes:
    """What a client reads until its connection ends."""
    found = b""
    try:
        while part := client.recv(1 << 16):
            found += part
    except ConnectionError:
        pass
    return found


@pytest.mark.slow
def test_streams_that_are_not_read_are_cut_and_hold_nothing(unpatient: None) -> None:
    app = tiny_app()
    fields = {"prompt": [1, 2, 3], "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 5, "n": 4}
    body = json.dumps({"model": MODEL, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with serving(app) as url, ExitStack() as stack:
        parts = urlsplit(url)
        clients = [stack.enter_context(narrow((parts.hostname or "", parts.port or 0))) for _ in range(3)]
        for client in clients:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
        engine = engine_of(app)
        while not engine.unfinished:
            time.sleep(0.01)
        while engine.unfinished:
            assert httpx.get(f"{url}/health").status_code == 200
            time.sleep(0.01)
        assert engine.core.scheduler.pool.used == 0
        assert not any(b"[DONE]" in rest(client) for client in clients)


@pytest.mark.anyio
@pytest.mark.parametrize("asked", [b"Connection: close\r\n", b""])
async def test_a_connection_ends_whose_last_answer_is_not_read(unpatient: None, asked: bytes) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"x" * 60_000})  # too few bytes for the server to wait

    async with bare(answer, timeout_keep_alive=0) as address:
        with narrow(address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + asked + b"\r\n")
            await asyncio.sleep(0.5)  # enough, or the next line reads all
            assert len(await asyncio.to_thread(rest, client)) < 60_000


class Pipe(asyncio.Transport):
    """A transport that sends nothing."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return 100_000


@pytest.mark.anyio
async def test_who_reads_in_time_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "UNREAD_SECONDS", 0.0)
    monkeypatch.setattr(client_limits, "READ_BYTES_PER_SECOND", 1 << 30)
    config = server_config(tiny_app(), log_level="warning")
    config.load()
    protocol, pipe = client_limits.BoundedProtocol(config, ServerState(), {}), Pipe()
    protocol.connection_made(pipe)
    for _ in range(2):
        protocol.pause_writing()
        protocol.resume_writing()
        await asyncio.sleep(0.01)
        assert not pipe.aborted
    protocol.pause_writing()
    while not pipe.aborted:
        await asyncio.sleep(0.01)
    protocol.connection_lost(ConnectionAbortedError())


# --- requests that are odd ---------------------------------------------------------------------------------

CLOSE = b"Host: a\r\nConnection: close\r\n\r\n"
CHUNKED = b" HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the server says meanwhile; uvicorn keeps its records to itself."""
    logging.getLogger("uvicorn").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("uvicorn").removeHandler(caplog.handler)


def answered(url: str, *parts: bytes) -> bytes:
    """What is answered to bytes until the connection ends; each part is sent when the one before it is answered."""
    found = b""
    with connected(url) as client:
        for part in parts[:-1]:
            client.sendall(part)
            found += client.recv(1 << 16)
        client.sendall(parts[-1])
        return found + rest(client)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (b"http://b/health", b"HTTP/1.1 200 "),
        (b"HTTPS://b:80/plan?parts=false", b"HTTP/1.1 200 "),
        (b"http://b", b"HTTP/1.1 200 "),
        (b"http://b?x", b"HTTP/1.1 200 "),
        (b"http://b/v1/files/", b"location: http://b/v1/files\r\n"),  # a host is named as the target names it
        (b"ftp://b/health", b"HTTP/1.1 404 "),
        (b"http:///health", b"HTTP/1.1 404 "),
    ],
)
def test_a_target_may_be_a_whole_url(url: str, target: bytes, line: bytes) -> None:
    assert line in answered(url, b"GET " + target + b" HTTP/1.1\r\n" + CLOSE)


def test_a_body_with_two_lengths_is_refused_with_all_that_follows(url: str) -> None:
    head = CHUNKED.replace(b"Host", b"Content-Length: 4\r\nHost")
    found = answered(url, b"POST /tokenize" + head + b"0\r\n\r\nGET /health HTTP/1.1\r\n" + CLOSE)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("parts", [(b"POST /nowhere" + CHUNKED, b"zz\r\n"), (b"POST /nowhere" + CHUNKED + b"zz\r\n",)])
def test_a_chunk_that_is_none_ends_the_connection_whatever_was_answered(
    url: str, parts: tuple[bytes, ...], said: pytest.LogCaptureFixture
) -> None:
    found = answered(url, *parts)
    assert found.startswith(b"HTTP/1.1 404 " if len(parts) > 1 else b"HTTP/1.1 400 ")
    assert httpx.get(f"{url}/health").status_code == 200
    assert [record for record in said.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_a_request_for_another_protocol_is_answered_in_this_one(
    url: str, protocol: bytes, said: pytest.LogCaptureFixture
) -> None:
    head = b"GET /health HTTP/1.1\r\nUpgrade: " + protocol + b"\r\nConnection: Upgrade\r\n"
    asked = head + b"Host: a\r\n\r\n", b"GET /health HTTP/1.1\r\n" + CLOSE
    assert answered(url, *asked).count(b"HTTP/1.1 200 ") == 2
    assert said.records == []
