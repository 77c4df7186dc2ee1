"""Checks before any route: the API key, and the size of the body."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bigmodel.server.http.errors import APIError, counted
from bigmodel.server.http.shares import KEY

OPEN_PATHS = frozenset({"/health", "/ready", "/"})


class KeyGuard:
    """401 for requests without one of ``keys``; the paths in :data:`OPEN_PATHS` need none."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._allowed(Headers(scope=scope))
        if key is not None:
            scope[KEY] = key
            await self._app(scope, receive, send)
            return
        error = APIError(
            401,
            "an API key is needed: send 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": 'Bearer realm="bigmodel"'},
        )
        await counted(scope["app"], error)(scope, receive, send)

    def _allowed(self, headers: Headers) -> str | None:
        """The key of a request that has a known one."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # the bytes sent; Starlette decodes headers as Latin-1
        # Every key is compared, in constant time: timing reveals neither which one matches nor how far.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return given.decode("latin-1") if scheme.lower() == "bearer" and any(matches) else None


class BodyLimit:
    """413 for bodies longer than ``limit()`` bytes, announced or not; no more than that is ever buffered."""

    def __init__(self, app: ASGIApp, limit: Callable[[], int]) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit()
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limit:
            await self._refuse(limit, scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise HTTPException(413, f"the body is longer than {limit} bytes")
            return message

        await self._app(scope, limited, send)

    async def _refuse(self, limit: int, scope: Scope, receive: Receive, send: Send) -> None:
        error = APIError(413, f"the body is longer than {limit} bytes", code="body_too_long")
        await counted(scope["app"], error)(scope, receive, send)
