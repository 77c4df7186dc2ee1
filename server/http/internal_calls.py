"""A request that the server makes itself: through the whole application, without a connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

_SERVER = "bigmodel"


@dataclass(frozen=True)
class InternalAnswer:
    """The answer to such a request."""

    status: int
    headers: Headers
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, /, **scope: Any) -> InternalAnswer:
    """Post a JSON body, and return the answer once it is complete. Cancelling it is as a client that leaves.

    Args:
        app: The application.
        path: The route.
        body: The body.
        scope: What the request's scope has beside the usual.
    """
    headers = [(b"host", _SERVER.encode()), (b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(body)).encode()))
    request = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": (_SERVER, 0),
        "server": (_SERVER, 0),
        **scope,
    }
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    started: Message = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if not pending:
            await asyncio.Event().wait()  # the client stays
        return pending.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            parts.append(message.get("body", b""))

    try:
        await app(request, receive, send)
    except Exception:
        if not started:  # else it is answered with an error, and raised again for a server's log
            raise
    return InternalAnswer(started["status"], Headers(raw=started["headers"]), b"".join(parts))
