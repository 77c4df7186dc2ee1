"""Does the server stay correct under thousands of clients: valid, invalid, slow, and disconnecting ones?

Every answer to a valid request is compared with the answer to the same request alone. Afterwards no slot may be in use,
and memory in the last quarter must not exceed that in the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .harness import Column, Limit, Report, Table
from .serve_client import completion, exchange, get, positions_held
from .serve_drawn import drawn_requests
from .serve_model import random_llama, word_tokenizer

KINDS = ("whole", "streamed", "bad", "drawn", "slow", "gone", "other")
_WEIGHTS = (37, 23, 10, 10, 5, 10, 5)

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it tests the HTTP server, which is the same for any device that the engine runs on"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--clients", type=int, default=None, help="clients in all (default: 10,000)")
    parser.add_argument("--at-once", type=int, default=24, help="clients at the same time")


def run(options: argparse.Namespace) -> Report:
    """Run the clients and count their results."""
    clients = options.clients or (200 if options.quick else 10_000)
    with _server(options) as (port, model, process):
        drawn = drawn_requests(port, 10 if options.quick else 600)
        crowd = Crowd(port, model, process, options.seed, drawn, different=8 if options.quick else 40)
        asyncio.run(crowd.come(clients, options.at_once))
        held = asyncio.run(positions_held(crowd.port))
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
            Limit("slots and key-value positions held afterwards", held, "==", 0, "count"),
            # In the quick form the server shares its process with its clients and all else in it.
            *([] if options.quick else [Limit("memory of the last quarter over the first", last / first, "<=", 1.02)]),
        ],
        notes=[f"statuses: {dict(sorted(crowd.statuses.items()))}; memory: {last / 2**20:.0f} MiB at the end"],
    )


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[tuple[int, str, int]]:
    """Port, model name and process of a server: one of its own, or (quick) a thread of this one."""
    if options.quick:
        from .serve_http import served

        model = random_llama("2x64", options.seed)
        with served(model, word_tokenizer(), max_sequences=16, prefix_cache=False) as (port, _):
            yield port, "model", os.getpid()
        return
    from .serve_peer import OURS, checkpoint, serving

    folder = checkpoint(options.workdir / "serve", "2x64", options.seed)
    with serving(OURS, folder, options.threads or 1) as server:
        server.process.send_signal(signal.SIGCONT)
        yield server.port, server.model, server.process.pid


@dataclass
class Crowd:
    """Clients of all kinds, and their results."""

    port: int
    model: str
    process: int
    seed: int
    drawn: list[bytes]
    different: int
    seen: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: int = 0
    wrong: int = 0
    memory: list[int] = field(default_factory=list)
    _right: dict[int, str] = field(default_factory=dict)

    async def come(self, clients: int, at_once: int) -> None:
        """Run ``clients`` clients, ``at_once`` at a time."""
        import psutil

        for number in range(self.different):
            text = _text(await self._post(self._request(number)))
            assert text is not None, "a good request was refused before anybody else was there"
            self._right[number] = text
        rng = random.Random(self.seed)
        turns = asyncio.Semaphore(at_once)
        measured_every = max(1, min(50, clients // 4))
        process = psutil.Process(self.process)

        async def one(kind: str, number: int) -> None:
            async with turns:
                await getattr(self, f"_{kind}")(number, rng)
                self.seen[kind] += 1
                if sum(self.seen.values()) % measured_every == 0:
                    self.memory.append(process.memory_info().rss)

        weights = [0 if kind == "drawn" and not self.drawn else w for kind, w in zip(KINDS, _WEIGHTS, strict=True)]
        kinds = rng.choices(KINDS, weights, k=clients)
        await asyncio.gather(*(one(kind, rng.randrange(self.different)) for kind in kinds))

    async def _whole(self, number: int, rng: random.Random) -> None:
        self._judge(number, _text(await self._post(self._request(number))))

    async def _streamed(self, number: int, rng: random.Random) -> None:
        status, body = await self._post({**self._request(number), "stream": True})
        if status == 200:
            events = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: {")]
            self._judge(number, "".join(json.loads(event)["choices"][0]["text"] for event in events))

    async def _bad(self, number: int, rng: random.Random) -> None:
        wrong: list[dict[str, Any]] = [
            *({"temperature": -1}, {"prompt": None}, {"model": "other"}, {"nonsense": 1}, {"n": 1000}),
            *({"prompt": [10**9]}, {"max_tokens": 10**9}, {"stop": [""]}, {"logit_bias": {"x": 1}}),
        ]
        status, _ = await self._post({**self._request(number), **rng.choice(wrong)})
        self.wrong += status == 200

    async def _drawn(self, number: int, rng: random.Random) -> None:
        """Send a request that schemathesis drew from the OpenAPI document."""
        await self._exchange(rng.choice(self.drawn))

    async def _slow(self, number: int, rng: random.Random) -> None:
        """Send the request in parts and read the answer late."""
        self._judge(number, _text(await self._post(self._request(number), pause=0.02)))

    async def _gone(self, number: int, rng: random.Random) -> None:
        """Disconnect before the answer is complete."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(completion({**self._request(number), "max_tokens": 400, "stream": rng.random() < 0.5}))
        await writer.drain()
        await asyncio.sleep(rng.random() * 0.03)
        writer.transport.abort()

    async def _other(self, number: int, rng: random.Random) -> None:
        """Request another route, or send bytes that are not HTTP."""
        path = rng.choice(["/health", "/ready", "/plan", "/metrics", "/", "/v1/models", "/nowhere"])
        await self._exchange(get(path))

    async def _post(self, body: dict[str, Any], pause: float = 0.0) -> tuple[int, bytes]:
        return await self._exchange(completion(body), pause)

    async def _exchange(self, raw: bytes, pause: float = 0.0) -> tuple[int, bytes]:
        status, body = await exchange(self.port, raw, pause)
        self.statuses[status] += 1
        self.failures += status >= 500 and status != 504  # 504: the client set a deadline
        return status, body

    def _request(self, number: int) -> dict[str, Any]:
        """Return one of the different requests: lengths, seeds and sampling parameters."""
        return {
            "model": self.model,
            "prompt": [(number * 7 + at) % 8000 for at in range(1 + number * 5)],
            "max_tokens": 3 + number % 9,
            "seed": number,
            "temperature": 0 if number % 3 else 1.0,
            "ignore_eos": True,
        }

    def _judge(self, number: int, text: str | None) -> None:
        if text is not None:  # None: refused because the queue was full
            self.wrong += text != self._right[number]


def _text(answer: tuple[int, bytes]) -> str | None:
    status, body = answer
    return str(json.loads(body)["choices"][0]["text"]) if status == 200 else None
