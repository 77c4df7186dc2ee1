"""Large bodies: refused before they are parsed, a few of each client at once, and clients do not wait for others."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any

import httpx
import pytest

from bigmodel.benchmarks.hostile_requests import EMBEDDINGS, dense_bodies
from bigmodel.server.http import json_bounds, parsing, state
from bigmodel.server.http.client_limits import Shares
from bigmodel.server.http.json_bounds import ITEM_BYTES, ITEMS
from bigmodel.server.http.parsing import SMALL_BYTES, in_thread
from tests.examples import alike
from tests.server.live import MODEL, serving, tiny_app
from tests.server.test_limits import wait_until

LARGE = {"model": MODEL, "prompt": "x", "max_tokens": 2, "ignore_eos": True, "user": "u" * SMALL_BYTES}


def post(url: str, content: bytes, **headers: str) -> httpx.Response:
    given = {"content-type": "application/json", **headers}
    return httpx.post(f"{url}/v1/completions", content=content, headers=given, timeout=60)


def test_a_large_body_is_answered_as_a_small_one_is(url: str) -> None:
    small = httpx.post(f"{url}/v1/completions", json={**LARGE, "user": "u", "seed": 1})
    large = httpx.post(f"{url}/v1/completions", json={**LARGE, "seed": 1})
    assert small.status_code == large.status_code == 200
    assert small.json()["choices"] == large.json()["choices"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [({"temperature": 9}, 400, "temperature"), ({"prompt": 7}, 422, "prompt"), ({"new": 1}, 400, "new")],
)
def test_a_bad_value_in_a_large_body_is_named(url: str, fields: dict[str, Any], status: int, param: str) -> None:
    answer = post(url, json.dumps({**LARGE, **fields}).encode())
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"[" * 30_000, 400, "nested too deeply"),
        (b'{"model": "' + b"x" * 20_000 + b'\xff"}', 400, "invalid unicode code point"),
        (b'{"model": "' + b"x" * 20_000 + b'\\ud800"}', 400, "no valid JSON"),
        (b'{"model": ' + b" " * 20_000, 400, "no valid JSON"),
        (b"[" + b"1," * 50_000 + b"1]", 413, "the body is too large: it has more than"),
        (json.dumps({**LARGE, "seed": 10**200}).encode(), 413, "a number in it has more than"),
    ],
)
def test_a_large_body_that_cannot_be_parsed_says_why(url: str, content: bytes, status: int, message: str) -> None:
    answer = post(url, content)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text
    assert len(answer.content) <= 1024


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 30_000,
        b"[" + b"1," * 50_000 + b"1]",
        json.dumps({**LARGE, "temperature": 9}).encode(),
        json.dumps({**LARGE, "prompt": "1 " * 50_000}).encode(),
    ],
    ids=["no JSON", "too many values", "a bad value", "too many tokens"],
)
def test_a_refused_body_is_freed_with_its_request(url: str, content: bytes) -> None:
    gc.collect()
    gc.disable()
    try:
        assert post(url, content).status_code >= 400
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        held = [each for each in gc.garbage if isinstance(each, FrameType)]
        assert not [each.f_code for each in held if any(_is_large(value) for value in each.f_locals.values())]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _is_large(value: Any) -> bool:
    return isinstance(value, bytes | str) and len(value) > SMALL_BYTES


def test_values_are_bounded_by_the_context(url: str) -> None:
    most = json_bounds.VALUES + 1024
    assert post(url, json.dumps({"model": MODEL, "prompt": [1] * most}).encode()).status_code == 413
    answer = post(url, json.dumps({"model": MODEL, "prompt": [1] * (most - 100)}).encode())
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """A server with two keys and one large body at once for each, whose first byte has come, and its state."""
    monkeypatch.setattr(state, "LARGE_OF_A_CLIENT", 1)
    monkeypatch.setattr(parsing, "FIRST_BYTES", 1)
    app = tiny_app(api_keys=("alpha", "beta"))
    with serving(app) as url:
        yield url, app.state.server


def begun(stack: ExitStack, url: str, key: str) -> socket.socket:
    """A large request without its last byte."""
    host, port = url.removeprefix("http://").split(":")
    client = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
    body = json.dumps(LARGE).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body[:-1])
    return client


@pytest.mark.slow
def test_a_client_s_large_bodies_wait_for_each_other_and_not_for_another_client_s(keyed: tuple[str, Any]) -> None:
    url, server = keyed
    with ExitStack() as stack:
        first = begun(stack, url, "alpha")
        wait_until(lambda: not server.large.idle)
        second: list[httpx.Response] = []
        content = json.dumps(LARGE).encode()
        waits = threading.Thread(target=lambda: second.append(post(url, content, authorization="Bearer alpha")))
        waits.start()
        assert post(url, content, authorization="Bearer beta").status_code == 200
        assert not second
        first.sendall(b"}")
        waits.join(60)
        assert second[0].status_code == 200
        assert b" 200 " in first.recv(100)
    wait_until(lambda: server.large.idle)


@pytest.mark.slow
def test_who_leaves_ends_its_turn(keyed: tuple[str, Any]) -> None:
    url, server = keyed
    with ExitStack() as stack:
        begun(stack, url, "alpha")
        wait_until(lambda: not server.large.idle)
    wait_until(lambda: server.large.idle)
    assert post(url, json.dumps(LARGE).encode(), authorization="Bearer alpha").status_code == 200


def test_a_body_that_has_not_come_takes_no_turn(keyed: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    url, server = keyed
    monkeypatch.setattr(parsing, "FIRST_BYTES", 64 << 10)
    with ExitStack() as stack:
        slow = [begun(stack, url, "alpha") for _ in range(3)]
        assert post(url, json.dumps(LARGE).encode(), authorization="Bearer alpha").status_code == 200
        assert server.large.idle
        slow[0].sendall(b"}")
        assert b" 200 " in slow[0].recv(100)


@pytest.mark.parametrize("others", [True, False])
def test_a_body_that_comes_slowly_leaves_its_turn_to_others(
    keyed: tuple[str, Any], others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = keyed
    monkeypatch.setattr(parsing, "REST_SECONDS", 0.0)
    with ExitStack() as stack:
        slow = begun(stack, url, "alpha")
        wait_until(lambda: not server.large.idle)
        if others:
            assert post(url, json.dumps(LARGE).encode(), authorization="Bearer alpha").status_code == 200
            assert b" 408 " in slow.recv(100)
        else:
            assert post(url, json.dumps(LARGE).encode(), authorization="Bearer beta").status_code == 200
            slow.sendall(b"}")
            assert b" 200 " in slow.recv(100)
    wait_until(lambda: server.large.idle)


def test_a_body_whose_turn_to_be_parsed_does_not_come_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "TURN_SECONDS", 0.01)
    app = tiny_app()
    app.state.server.parsing = Shares(1, 0)
    with serving(app) as url:
        answer = post(url, json.dumps(LARGE).encode())
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_at_once")
    assert answer.headers["retry-after"] == "5"


@pytest.mark.anyio
@pytest.mark.parametrize("times", [1, 2])
async def test_what_fails_for_nobody_is_not_logged(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_exception_handler", reported.append)
    begun, end = threading.Event(), threading.Event()

    def fails() -> None:
        begun.set()
        end.wait()
        raise ValueError

    before = asyncio.all_tasks()
    waiting = asyncio.ensure_future(in_thread(fails))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    for _ in range(times):
        waiting.cancel()
        await asyncio.sleep(0.001)
    end.set()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    del waiting
    while asyncio.all_tasks() != before:
        await asyncio.sleep(0.001)
    gc.collect()
    assert reported == []


def test_messages_are_as_many_as_a_body_has_room_for(url: str) -> None:
    user = {"role": "user", "content": "x"}
    for count, padding, refused in [
        (ITEMS, "", False),
        (ITEMS + 1, "", True),
        (ITEMS + 1, "x" * ITEMS * ITEM_BYTES, False),
    ]:
        body = {"model": MODEL, "messages": [user] * (count - 1) + [{**user, "content": padding}], "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        found = answer["error"]["message"]
        assert (f"more than {ITEMS} items in 'messages'" in found) == refused, found


MANY = {name: body for name, body in dense_bodies(MODEL).items() if body[0] != EMBEDDINGS}  # whose answers are large


@alike("name", sorted(MANY, key="messages".__ne__), first=1)
def test_a_body_of_many_parts_takes_four_times_its_bytes_or_four_mib_or_is_refused(url: str, name: str) -> None:
    path, made = MANY[name]
    for parts in (2000, 8000):
        body = made(parts)
        gc.collect()
        tracemalloc.start()
        try:
            answer = httpx.post(f"{url}{path}", content=body, headers={"content-type": "application/json"}, timeout=60)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert answer.status_code in (200, 400, 413)
        assert peak <= 4 * max(1 << 20, len(body)), parts
