"""Work on texts of clients that may take long: done beside the event loop, by few threads at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

T = TypeVar("T")

SMALL_BYTES = 16 << 10
"""Texts up to this size are processed in the event loop: a thread would take longer."""

THREADS = 2
"""Threads that parse and tokenise. The pool that all routes share stays free for short work."""


@cache
def _threads() -> CapacityLimiter:
    return CapacityLimiter(THREADS)


async def off_loop(size: int, function: Callable[[], T]) -> T:
    """Return what `function` returns, run in a thread if it works on more than `SMALL_BYTES` of text."""
    if size <= SMALL_BYTES:
        return function()
    return await anyio.to_thread.run_sync(function, limiter=_threads())


class JSONRoute(APIRoute):
    """A route that parses large bodies beside the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, given requests that parse themselves that way."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JSONRequest(request.scope, request.receive))

        return handler


class _JSONRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        return await off_loop(len(body), lambda: json.loads(body))
