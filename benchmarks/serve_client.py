"""HTTP as plain bytes on a socket, for clients that must take little CPU time. Imports only the standard library."""

from __future__ import annotations

import asyncio
import json
from typing import Any


def completion(body: dict[str, Any]) -> bytes:
    """POST /v1/completions as it goes over the wire."""
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text


def get(path: str) -> bytes:
    """GET as it goes over the wire."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


async def exchange(port: int, request: bytes, pause: float = 0.0) -> tuple[int, bytes]:
    """Send a request, in four parts ``pause`` seconds apart if that is set; return status and body of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    size = max(1, len(request) // 4) if pause else len(request)
    for at in range(0, len(request), size):
        writer.write(request[at : at + size])
        await writer.drain()
        if pause:
            await asyncio.sleep(pause)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split(b" ", 2)[1]), unchunked(body) if b"chunked" in head.lower() else body


async def positions_held(port: int) -> int:
    """Return the sequences and key-value positions that a server still holds, waiting at most ten seconds for none."""
    for _ in range(200):
        _, body = await exchange(port, get("/plan?parts=false"))
        engine = json.loads(body)["engine"]
        held = int(engine["running"] + engine["waiting"] + engine["kv_tokens"]["used"])
        if not held:
            break
        await asyncio.sleep(0.05)
    return held


def unchunked(body: bytes) -> bytes:
    """Return the body without the chunk lengths of chunked transfer encoding."""
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        out += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return out


def read_streams(port: int, streams: int, tokens: int) -> int:
    """Read ``streams`` completions at once, as streams; return the number of events. Runs in the clients' process."""
    request = completion(
        {
            "model": "model",
            "prompt": [2] * 16,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
    )

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer.count(b"data: {")

    async def everybody() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))

    events = asyncio.run(everybody())
    if events < streams * tokens:
        raise RuntimeError(f"{events} events arrived where {streams * tokens} were due")
    return events
