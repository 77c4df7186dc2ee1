"""Waiting for the engine's events and passing them to an answer, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse
from starlette.responses import Response

from bigmodel.server.engine import Delta, Done, Engine, Failed, Request
from bigmodel.server.errors import APIError
from bigmodel.server.mailbox import Mailbox
from bigmodel.server.sse import DONE, ClientGoneError, EventStream, event, unless_disconnected


class Answer(Protocol):
    """Writes deltas down, as a stream's chunks or for one whole body."""

    def opening(self) -> bytes: ...

    def chunk(self, index: int, delta: Delta) -> bytes: ...

    def closing(self, done: Done) -> bytes: ...

    def add(self, index: int, delta: Delta) -> None: ...

    def whole(self, done: Done) -> dict[str, Any]: ...


class Joined:
    """The engine requests that one HTTP request became (one per prompt), read as one."""

    def __init__(self, engine: Engine, requests: list[Request], mailbox: Mailbox) -> None:
        self._engine = engine
        self._requests = requests
        self._mailbox = mailbox
        self.done = Done(0, 0, 0)

    async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """(choice, delta) pairs as they arrive, until every request is done. Raises APIError on failure."""
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
        """Cancel what is not finished. Called when the answer is complete or nobody waits for it."""
        for number, request in enumerate(self._requests):
            if number not in self._mailbox.finished:
                self._engine.cancel(request)


async def respond(http: HTTPRequest, joined: Joined, answer: Answer, *, stream: bool) -> Response:
    """The HTTP answer: an event stream, or one JSON body."""
    if stream:
        return EventStream(_stream(joined, answer), joined.release)
    try:
        body = await unless_disconnected(http.receive, _whole(joined, answer))
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it; the access log shows it
    finally:
        joined.release()
    return JSONResponse(body)


async def _whole(joined: Joined, answer: Answer) -> dict[str, Any]:
    async for batch in joined.batches():
        for index, delta in batch:
            answer.add(index, delta)
    return answer.whole(joined.done)


async def _stream(joined: Joined, answer: Answer) -> AsyncIterator[bytes]:
    try:
        opening = answer.opening()
        if opening:
            yield opening
        async for batch in joined.batches():
            yield b"".join([answer.chunk(index, delta) for index, delta in batch])
        yield answer.closing(joined.done) + DONE
    except APIError as error:
        yield event(json.dumps(error.body))


def failure(failed: Failed) -> APIError:
    """What the client is told when the engine gave a request up."""
    if failed.kind == "timeout":
        return APIError(504, f"the request timed out: {failed.message}", code="timeout")
    return APIError(500, failed.message, code="engine_failed")


def _sum(a: Done, b: Done) -> Done:
    return Done(
        a.prompt_tokens + b.prompt_tokens,
        a.completion_tokens + b.completion_tokens,
        a.cached_tokens + b.cached_tokens,
    )
