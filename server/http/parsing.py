"""Work on texts of clients that may take long: done beside the event loop, by few threads, each client in its turn.

A request with a large body takes a turn once its body, or the beginning of it, has come, and ends it once the engine
has the request. Until then the rest of the body waits at the client: only so many are in memory at once. What comes
slowly takes no turn from others.
"""

from __future__ import annotations

import asyncio
import json
import time
from codecs import BOM_UTF8
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Protocol, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive

from bigmodel.server.http.client_limits import Shares, client_of
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.json_bounds import VALUES, check_bounds, check_items
from bigmodel.server.http.respond import seen, unless_disconnected
from bigmodel.server.http.state import FETCHING_THREADS, PARSING_THREADS, ServerState, state_of
from bigmodel.server.models.running import forget_frames
from bigmodel.server.text.long_texts import LONG, left

T = TypeVar("T")

SMALL_BYTES = 16 << 10
"""Texts up to this size are processed in the event loop: a thread would take longer."""

ANY_SIZE = SMALL_BYTES + 1
"""For work whose time is unknown, for any size of its text."""

TURN_SECONDS = 30.0
"""How long a request waits for its turn to be parsed, tokenised or compiled."""

FIRST_BYTES = 64 << 10
"""Bytes of a large body that come before it takes a turn, unless it is shorter: a connection buffers about as many."""

REST_SECONDS = 5.0
"""How long the rest of a body may take to come, where others wait for its turn: a second more for as many bytes as
`REST_BYTES_PER_SECOND`."""

REST_BYTES_PER_SECOND = 64 << 10

_LOOK_SECONDS = 0.1

_TURN = "bigmodel.turn"


class OffLoop(Protocol):
    """Runs a function on `size` bytes of text, where and when it does not hold up others."""

    async def __call__(self, size: int, function: Callable[[], T], /) -> T: ...


async def off_loop(size: int, function: Callable[[], T]) -> T:
    """Return what `function` returns, run in a thread if it works on more than `SMALL_BYTES` of text."""
    return function() if size <= SMALL_BYTES else await in_thread(function)


def in_turn(http: Request) -> OffLoop:
    """Return :func:`off_loop` for the client of a request: at most one thread works for it at a time.

    It raises ClientGoneError, and long texts are not tokenised to their end, where the client leaves meanwhile.
    """

    async def run(size: int, function: Callable[[], T]) -> T:
        if size <= SMALL_BYTES:
            return function()
        async with turn(state_of(http).parsing, http):
            work = in_thread(function)
            return await (work if size < LONG else unless_disconnected(http.receive, work))

    return run


@asynccontextmanager
async def turn(shares: Shares, http: Request) -> AsyncIterator[None]:
    """A turn of the client of a request, whose body has been read.

    Raises ClientGoneError if the client leaves before it has a turn, and a 429 if it has none for too long.
    """
    client = client_of(http.scope)
    if not shares.take(client):
        try:
            await unless_disconnected(http.receive, shares.wait(client, TURN_SECONDS))
        except TimeoutError:
            why = f"no turn within {TURN_SECONDS:g} s: too many requests of this client take long to prepare"
            raise APIError(429, why, code="too_many_at_once", headers={"Retry-After": "5"}) from None
    try:
        yield
    finally:
        shares.give_back(client)


def fetching(http: Request) -> Callable[[list[str]], Awaitable[Sequence[str | bytes]]] | None:
    """Return what fetches images for the client of a request, where any are: one thread at a time does for it."""
    state = state_of(http)
    hosts = state.image_hosts
    if hosts is None:
        return None

    async def fetch(urls: list[str]) -> Sequence[str | bytes]:
        async with turn(state.fetching, http):
            return await anyio.to_thread.run_sync(hosts.fetch, urls, limiter=_fetchers())

    return fetch


async def in_thread(function: Callable[[], T]) -> T:
    """Return what `function` returns, run in a thread. The pool that all routes share stays free for what is short.

    Cancelled, it ends with the thread, which is told by `long_texts.left`: only so many run at once.
    """
    gone: Future[None] = Future()
    before = left.set(gone)
    working = asyncio.ensure_future(anyio.to_thread.run_sync(function, limiter=_threads()))
    left.reset(before)
    working.add_done_callback(seen)
    try:
        await asyncio.wait({working})  # after `asyncio.shield`, Python 3.14 logs what is raised for nobody
    except asyncio.CancelledError:
        gone.set_result(None)
        await asyncio.wait({working})
        raise
    return working.result()


@cache
def _fetchers() -> CapacityLimiter:
    return CapacityLimiter(FETCHING_THREADS)


@cache
def _threads() -> CapacityLimiter:
    return CapacityLimiter(PARSING_THREADS + 1)  # and one that waits for the process that compiles grammars


def end_turn(http: Request) -> None:
    """Let the next large request of the client begin: the engine has this one."""
    end: Callable[[], None] | None = http.scope.pop(_TURN, None)
    if end is not None:
        end()


class JSONRoute(APIRoute):
    """A route that parses and validates large bodies beside the event loop, as many at once as there are turns."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, given requests that parse themselves that way."""
        handle = super().get_route_handler()
        kind: type[BaseModel] = self.dependant.body_params[0].field_info.annotation  # type: ignore[assignment]

        async def handler(request: Request) -> Response:
            receive = request.receive
            if _is_large(request):
                shares, client = state_of(request).large, client_of(request.scope)
                receive = await _begun(receive)
                await shares.wait(client)
                request.scope[_TURN] = lambda: shares.give_back(client)
                receive = _in_time(receive, lambda: shares.wanted(client))
            try:
                return await handle(_JSONRequest(request.scope, receive, kind))
            except BaseException as error:
                forget_frames(error)  # frames that refer to their error would hold the body until garbage is collected
                raise
            finally:
                end_turn(request)

        return handler


def _is_large(request: Request) -> bool:
    """Whether the body is announced as large, or not announced."""
    length = request.headers.get("content-length", "")
    return int(length[:20]) > SMALL_BYTES if length.isdecimal() else "transfer-encoding" in request.headers


async def _begun(receive: Receive) -> Receive:
    """Return `receive` once it has `FIRST_BYTES` of a body, or all of it."""
    pending: deque[Message] = deque()
    size, more = 0, True
    while more and size < FIRST_BYTES:
        message = await receive()
        pending.append(message)
        size += len(message.get("body", b""))
        more = message.get("more_body", False)

    async def again() -> Message:
        return pending.popleft() if pending else await receive()

    return again


def _in_time(receive: Receive, wanted: Callable[[], bool]) -> Receive:
    """Return `receive`; it raises a 408 where the rest of a body takes too long while its turn is wanted."""
    end = time.monotonic() + REST_SECONDS
    more = True

    async def next_part() -> Message:
        nonlocal end, more
        if not more:
            return await receive()
        part = asyncio.ensure_future(receive())
        try:
            while not (await asyncio.wait({part}, timeout=max(_LOOK_SECONDS, end - time.monotonic())))[0]:
                if wanted():
                    why = "the body comes too slowly while others wait for their turn"
                    raise HTTPException(408, why, {"Connection": "close"})
        finally:
            part.cancel()
        message = part.result()
        end += len(message.get("body", b"")) / REST_BYTES_PER_SECOND
        more = message.get("more_body", False)
        return message

    return next_part


class _JSONRequest(Request):
    def __init__(self, scope: Any, receive: Any, kind: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._kind = kind
        self._large: bytes | None = None

    async def body(self) -> bytes:
        """Return the body; of a large one only its first byte, the rest is for `json`.

        FastAPI keeps the result until the request is answered, beside the parsed body.
        """
        body = await super().body()
        if len(body) > SMALL_BYTES:
            self._large, self._body = body, body[:1]
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        if self._large is None:
            return json.loads(body)
        body, self._large = self._large, None
        state = state_of(self)
        values, string_bytes = most_values(state), state.text_limit
        async with turn(state.parsing, self):
            return await in_thread(lambda: _validated(self._kind, body, values, string_bytes))


def most_values(state: ServerState) -> int:
    """Values that a body may have."""
    return VALUES + state.longest


def _validated(kind: type[BaseModel], body: bytes, values: int, string_bytes: int) -> Any:
    """Return the body as an instance of `kind`, which FastAPI takes as it is."""
    check_bounds(body, values, string_bytes)
    try:
        # Not `json.loads`: it decodes the whole body first, to four bytes a character where one needs them.
        parsed = from_json(body.removeprefix(BOM_UTF8))
    except ValueError as error:
        if "recursion limit" in str(error):
            raise RecursionError from None
        raise json.JSONDecodeError(str(error), "", 0) from None
    check_items(parsed, len(body))
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        raise RequestValidationError([{**found, "loc": ("body", *found["loc"])} for found in error.errors()]) from None
