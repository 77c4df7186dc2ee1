"""Server-sent events, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(data: str) -> bytes:
    """One event with ``data``, which must be on one line."""
    return f"data: {data}\n\n".encode()


class EventStream(Response):
    """Sends what ``chunks`` yields, each piece one or more whole events.

    ``release`` is called when the stream has ended, however it ended: read to its end, failed, or left by
    the client.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], release: Callable[[], None]) -> None:
        self._chunks = chunks
        self._release = release
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
            await _end(sending)
            await _end(leaving)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ClientGoneError(Exception):
    """The client closed the connection before the answer was there."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``; it is cancelled, and :class:`ClientGoneError` raised, when the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await _end(working)
        await _end(leaving)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[T]) -> None:
    """Cancel a task if it still runs, and wait until it has ended."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen: a task's unread exception would be logged when it is collected
