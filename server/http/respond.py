"""From engine events to the HTTP response: into the event loop, then out as one body or as an event stream."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bigmodel.server.answers.sse import COMMENT
from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.scheduling.request import Delta, Done, Event, Failed, Request, TokenLogprob
from bigmodel.server.http.errors import APIError

logger = logging.getLogger(__name__)

T = TypeVar("T")

AT_ONCE = 2000
"""Tokens, log-probabilities of others included, of which an answer is written in the event loop: one of more is written
in a thread, where it does not hold up others."""

WRITING_THREADS = 2

ALIVE_SECONDS = 10.0
"""A stream that has been silent for so long says that it is alive, within as long again.

Large prompts, queues, weights that are streamed and calls that are read as a whole make silences of minutes. Proxies
close connections that are silent for a minute, nginx for one.
"""


# --- from the engine's thread to the event loop -------------------------------------------------------


class Relay:
    """Carries the events of all requests to one event loop, with one wake-up per burst."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[MailboxSink, Event]] = deque()
        self._scheduled = False

    @property
    def undelivered(self) -> int:
        """Events on their way to the loop."""
        return len(self._pending)

    def post(self, sink: MailboxSink, event: Event) -> None:
        """Queue an event for the loop. Called from the engine's thread."""
        self._pending.append((sink, event))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop is closed: nobody reads this event or any later one.
                self._pending.clear()
                self._scheduled = False

    def _deliver(self) -> None:
        # Cleared first: an event appended from now on schedules another delivery.
        self._scheduled = False
        while self._pending:
            sink, event = self._pending.popleft()
            sink.mailbox.receive(sink.number, event)


class Mailbox:
    """Events of the engine requests of one HTTP request, in order of arrival.

    ``at_once``: an engine request's events are delivered together with its last one, so that the event loop sleeps
    while the engine computes a response that is not streamed.
    """

    def __init__(self, relay: Relay, *, at_once: bool = False) -> None:
        self._relay = relay
        self.at_once = at_once
        self._events: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()
        self.finished: set[int] = set()

    def sink(self, number: int) -> MailboxSink:
        """The sink of engine request ``number``."""
        return MailboxSink(self, self._relay, number)

    def receive(self, number: int, event: Event) -> None:
        """Store an event. Called in the event loop."""
        self._events.append((number, event))
        if isinstance(event, (Done, Failed)):
            self.finished.add(number)
        self._arrived.set()

    async def take(self) -> list[tuple[int, Event]]:
        """Wait for an event; all (request number, event) that have arrived."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events


@dataclass(frozen=True)
class MailboxSink:
    """Puts the events of one engine request into a mailbox. Called from the engine's thread."""

    mailbox: Mailbox
    relay: Relay
    number: int
    _held: list[Event] = field(default_factory=list)

    def put(self, event: Event, /) -> None:
        """Post the event; hold it back where the mailbox wants all at once."""
        self._held.append(event)
        if self.mailbox.at_once and not isinstance(event, (Done, Failed)):
            return
        for held in self._held:
            self.relay.post(self, held)
        self._held.clear()


class JoinedRequests:
    """The engine requests of one HTTP request (one per prompt), read as one."""

    def __init__(self, engine: Engine, requests: list[Request], mailbox: Mailbox) -> None:
        self._engine = engine
        self._requests = requests
        self._mailbox = mailbox
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.done = Done(0, 0, 0)

    async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """(choice index, delta) pairs as they arrive, until every request is done. Raises APIError on failure."""
        finished = 0
        while finished < len(self._requests):
            batch = []
            for number, one in await self._mailbox.take():
                if isinstance(one, Failed):
                    raise failure(one)
                if isinstance(one, Done):
                    finished += 1
                    self.done = _sum(self.done, one)
                else:
                    batch.append((number * self._requests[0].n + one.index, one))
            if batch:
                yield batch

    def release(self) -> None:
        """Cancel unfinished requests. Called when the response is complete or the client has gone."""
        for number, request in enumerate(self._requests):
            if number not in self._mailbox.finished:
                self._engine.cancel(request)


def failure(failed: Failed) -> APIError:
    """The error response of a failed engine request."""
    if failed.kind == "timeout":
        return APIError(504, f"the request timed out: {failed.message}", code="timeout")
    if failed.kind == "node_lost":  # all processes are started again
        return APIError(503, failed.message, code="node_lost", headers={"Retry-After": "5"})
    return APIError(500, failed.message, code="engine_failed")


def _sum(a: Done, b: Done) -> Done:
    return Done(
        a.prompt_tokens + b.prompt_tokens,
        a.completion_tokens + b.completion_tokens,
        a.cached_tokens + b.cached_tokens,
    )


# --- the response -------------------------------------------------------------------------------------


class Answer(Protocol):
    """Formats deltas, as chunks of a stream (opening, chunk, closing or failed) or as one body (add, whole).

    Attributes:
        alive: What a stream says that has nothing to say yet.
    """

    alive: bytes

    def opening(self) -> bytes: ...

    def chunk(self, index: int, delta: Delta) -> bytes: ...

    def closing(self, done: Done) -> bytes: ...

    def failed(self, status: int, error: dict[str, Any]) -> bytes: ...

    def add(self, index: int, delta: Delta) -> None: ...

    def whole(self, done: Done) -> bytes: ...


async def respond(http: HTTPRequest, joined: JoinedRequests, answer: Answer, *, stream: bool) -> Response:
    """The HTTP response: an event stream, or one JSON body."""
    if stream:
        return EventStream(_stream(joined, answer), joined.release, answer.alive)
    try:
        return await unless_disconnected(http.receive, _whole(joined, answer))
    except ClientGoneError:
        return Response(status_code=499)  # for the access log: the client has gone
    finally:
        joined.release()


async def _whole(joined: JoinedRequests, answer: Answer) -> Response:
    size = prompts = joined.prompt_tokens  # which an answer may repeat

    def add(batch: list[tuple[int, Delta]]) -> None:
        for index, delta in batch:
            answer.add(index, delta)

    async for batch in joined.batches():
        added = _tokens(batch)
        size += added
        await _beside(prompts + added, partial(add, batch))
    body = await _beside(size, lambda: answer.whole(joined.done))
    return Response(body, media_type="application/json")


def _tokens(batch: list[tuple[int, Delta]]) -> int:
    """Tokens of deltas, with those whose log-probabilities they tell."""
    return sum(
        len(delta.token_ids) + _alternatives(delta.logprobs) + _alternatives(delta.prompt_logprobs or ())
        for _, delta in batch
    )


def _alternatives(entries: Sequence[TokenLogprob | None]) -> int:
    last = entries[-1] if entries else None  # each has as many, but for that of a prompt's first token
    return 0 if last is None else len(entries) * (1 + len(last.top))


async def _beside(size: int, function: Callable[[], T]) -> T:
    """Return what a function returns that writes so many tokens, run in a thread if they are many."""
    return function() if size <= AT_ONCE else await anyio.to_thread.run_sync(function, limiter=_writers())


@cache
def _writers() -> CapacityLimiter:
    return CapacityLimiter(WRITING_THREADS)


async def _stream(joined: JoinedRequests, answer: Answer) -> AsyncIterator[bytes]:
    try:
        opening = answer.opening()
        if opening:
            yield opening
        prompts = joined.prompt_tokens  # which the first events may repeat

        def chunks(batch: list[tuple[int, Delta]]) -> bytes:
            return b"".join([answer.chunk(index, delta) for index, delta in batch])

        async for batch in joined.batches():
            yield await _beside(prompts + _tokens(batch), partial(chunks, batch))
            prompts = 0
        yield answer.closing(joined.done)
    except APIError as error:
        yield answer.failed(error.status, error.body["error"])
    except Exception:
        logger.exception("a stream failed")
        yield answer.failed(500, APIError(500, "internal error; the server's log says more").body["error"])


class EventStream(Response):
    """Sends what ``chunks`` yields, each chunk one or more whole server-sent events.

    ``release`` is called when the stream ends: complete, failed, or left by the client. ``alive`` is an event that is
    sent in silences, see `ALIVE_SECONDS`.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], release: Callable[[], None], alive: bytes = COMMENT) -> None:
        self._chunks = chunks
        self._release = release
        self._alive = alive
        self._silent = False
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._release()
            await _end(sending, leaving)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        living = asyncio.ensure_future(self._say_alive(send))
        try:
            async for chunk in self._chunks:
                if chunk:
                    self._silent = False
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            await _end(living)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _say_alive(self, send: Send) -> None:
        while True:
            self._silent = True
            await asyncio.sleep(ALIVE_SECONDS)
            if self._silent:
                await send({"type": "http.response.body", "body": self._alive, "more_body": True})


class ClientGoneError(Exception):
    """The client closed the connection before the response was complete."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``; when the client disconnects, cancels it and raises :class:`ClientGoneError`."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await _end(working, leaving)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks that still run, all before the wait for their end: it may be cancelled itself."""
    running = {task for task in tasks if not task.done()}
    for task in tasks:
        task.add_done_callback(seen)
        task.cancel()
    if running:
        await asyncio.wait(running)


def seen(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a task: asyncio logs those that nobody retrieves."""
    if not task.cancelled():
        task.exception()
