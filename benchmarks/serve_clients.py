"""Does the server stay whole under thousands of clients, good, bad, slow and gone before the answer?

Every good answer is held against the one that the same request got alone, beforehand. Afterwards no slot may be held,
and memory of the last quarter may not lie above that of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .harness import Column, Limit, Report, Table
from .serve_model import random_llama, word_tokenizer

KINDS = ("whole", "streamed", "bad", "slow", "gone", "other")
_WEIGHTS = (40, 25, 15, 5, 10, 5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this question can be asked with."""
    parser.add_argument("--clients", type=int, default=10_000, help="clients in all")
    parser.add_argument("--at-once", type=int, default=24, help="clients at the same time")


def run(options: argparse.Namespace) -> Report:
    """Send the clients and count what they saw."""
    from .serve_http import served

    clients = 200 if options.quick else options.clients
    with served(random_llama("2x64", options.seed), word_tokenizer(), max_sequences=16) as (port, app):
        crowd = Crowd(port, options.seed)
        asyncio.run(crowd.come(clients, options.at_once))
        engine = app.state.server.engine
        held = asyncio.run(_settled(engine))
    quarter = max(1, len(crowd.memory) // 4)
    first = sorted(crowd.memory[:quarter])[quarter // 2]
    last = sorted(crowd.memory[-quarter:])[quarter // 2]
    rows: list[list[Any]] = [[kind, crowd.seen[kind]] for kind in KINDS]
    return Report(
        "serve_clients",
        options.device,
        settings={"clients": clients, "at_once": options.at_once},
        tables=[
            Table(f"{clients} clients, {options.at_once} at once", [Column("kind"), Column("clients", "count")], rows)
        ],
        limits=[
            Limit("answers with status 500 or above", crowd.failures, "==", 0, "count"),
            Limit("good answers that were wrong", crowd.wrong, "==", 0, "count"),
            Limit("slots held afterwards", held, "==", 0, "count"),
            Limit("memory of the last quarter over the first", last / first, "<=", 1.02),
        ],
        notes=[f"statuses: {dict(sorted(crowd.statuses.items()))}"],
    )


async def _settled(engine: Any) -> int:
    """Slots still held when everybody has gone, after at most ten seconds."""
    for _ in range(1000):
        if not engine.unfinished:
            break
        await asyncio.sleep(0.01)
    return int(engine.unfinished)


@dataclass
class Crowd:
    """Clients of all kinds, and what they saw."""

    port: int
    seed: int
    seen: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: int = 0
    wrong: int = 0
    memory: list[int] = field(default_factory=list)
    _right: dict[int, str] = field(default_factory=dict)

    async def come(self, clients: int, at_once: int) -> None:
        """Let ``clients`` come, ``at_once`` at a time."""
        import psutil

        for number in range(40):
            self._right[number] = _text(await self._post(_request(number)))
        rng = random.Random(self.seed)
        turns = asyncio.Semaphore(at_once)
        process = psutil.Process()

        async def one(kind: str, number: int) -> None:
            async with turns:
                await getattr(self, f"_{kind}")(number, rng)
                self.seen[kind] += 1
                if sum(self.seen.values()) % 50 == 0:
                    self.memory.append(process.memory_info().rss)

        kinds = rng.choices(KINDS, _WEIGHTS, k=clients)
        await asyncio.gather(*(one(kind, rng.randrange(40)) for kind in kinds))

    async def _whole(self, number: int, rng: random.Random) -> None:
        self._judge(number, _text(await self._post(_request(number))))

    async def _streamed(self, number: int, rng: random.Random) -> None:
        status, body = await self._post({**_request(number), "stream": True})
        if status == 200:
            events = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: {")]
            self._judge(number, "".join(json.loads(event)["choices"][0]["text"] for event in events))

    async def _bad(self, number: int, rng: random.Random) -> None:
        wrong: list[dict[str, Any]] = [
            *({"temperature": -1}, {"prompt": None}, {"model": "other"}, {"nonsense": 1}, {"n": 1000}),
            *({"prompt": [10**9]}, {"max_tokens": 10**9}, {"stop": [""]}, {"logit_bias": {"x": 1}}),
        ]
        status, _ = await self._post({**_request(number), **rng.choice(wrong)})
        self.wrong += status == 200

    async def _slow(self, number: int, rng: random.Random) -> None:
        """Sends its request in pieces and reads the answer late."""
        self._judge(number, _text(await self._post(_request(number), pause=0.02)))

    async def _gone(self, number: int, rng: random.Random) -> None:
        """Leaves before the answer is there."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(_raw({**_request(number), "max_tokens": 400, "stream": rng.random() < 0.5}))
        await writer.drain()
        await asyncio.sleep(rng.random() * 0.03)
        writer.transport.abort()

    async def _other(self, number: int, rng: random.Random) -> None:
        """Looks at the other routes, or speaks no sense."""
        path = rng.choice(["/health", "/ready", "/plan", "/metrics", "/", "/v1/models", "/nowhere"])
        await self._exchange(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())

    async def _post(self, body: dict[str, Any], pause: float = 0.0) -> tuple[int, bytes]:
        return await self._exchange(_raw(body), pause)

    async def _exchange(self, raw: bytes, pause: float = 0.0) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for at in range(0, len(raw), max(1, len(raw) // 4)):
            writer.write(raw[at : at + max(1, len(raw) // 4)])
            await writer.drain()
            if pause:
                await asyncio.sleep(pause)
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        self.statuses[status] += 1
        self.failures += status >= 500
        return status, _unchunked(body) if b"chunked" in head.lower() else body

    def _judge(self, number: int, text: str | None) -> None:
        if text is not None:  # None: refused because the queue was full
            self.wrong += text != self._right[number]


def _request(number: int) -> dict[str, Any]:
    """Forty different requests: lengths, seeds and ways of choosing."""
    return {
        "model": "model",
        "prompt": [(number * 7 + at) % 8000 for at in range(1 + number * 5)],
        "max_tokens": 3 + number % 9,
        "seed": number,
        "temperature": 0 if number % 3 else 1.0,
        "ignore_eos": True,
    }


def _raw(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


def _text(answer: tuple[int, bytes]) -> str | None:
    status, body = answer
    return str(json.loads(body)["choices"][0]["text"]) if status == 200 else None


def _unchunked(body: bytes) -> bytes:
    """The body without the lengths that chunked transfer writes between its pieces."""
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        out += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return out
