"""Clients that read streams, in a process of their own: nothing heavy is imported here."""

from __future__ import annotations

import asyncio
import json


def read_streams(port: int, streams: int, tokens: int) -> int:
    """Read so many completions at once, as streams; the number of events. Runs in the clients' process."""
    body = {"model": "model", "prompt": [2] * 16, "max_tokens": tokens, "temperature": 0, "stream": True}
    text = json.dumps({**body, "ignore_eos": True}).encode()

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        writer.write(head.encode() + text)
        answer = await reader.read()
        writer.close()
        return answer.count(b"data: {")

    async def everybody() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))

    events = asyncio.run(everybody())
    if events < streams * tokens:
        raise RuntimeError(f"{events} events arrived where {streams * tokens} were due")
    return events
