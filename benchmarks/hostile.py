"""Can hostile clients stop `bigmodel serve`, hold it up, or fill its memory?

Thousands of requests drawn by seed (see `hostile_requests`) go to one running server, while another process asks
/health. Then the largest bodies, one by one, with the peak of the server's memory, and bodies of as many parts as each
route takes; then streams of tokens, without and beside clients that have schemas compiled that never end. Before
and after all that the same request is asked.

"Memory before" is that of a server in use, not of one that was just started: good requests come first, some as of the
storm, prompts of every length up to `LONGEST_PROMPT` and embeddings of many texts. They are what any day brings, and a
server keeps memory for them: modules imported at first use, keys and values of as many sequences, and the kernels that
libraries of the host keep for each number of rows of a step, about 30 MB for all lengths. Hostile requests reach the
same lengths; without the good ones, what they leave would be counted as theirs. No hostile request, no body that is
refused and none beyond the context comes before that mark, so that what parsing, refusing and compiling keep is counted
in full. The notes say what the server had when it was ready, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .harness import BenchmarkError, Column, Limit, Report, Table
from .harness.isolate import import_folder
from .hostile_requests import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    KINDS,
    LARGEST,
    Attack,
    bomb,
    chat,
    dense_bodies,
    draw,
    largest_bodies,
    largest_of_routes,
    post,
)
from .serve_client import exchange, get, positions_held, unchunked
from .serve_peer import checkpoint

PATIENCE = 90.0  # seconds for one answer; the server closes an incomplete request after 60
NO_ANSWER = 599  # counted as a failure of the server's
LEAST_BODY = 1 << 20  # bytes that a smaller body counts as: any request takes some memory
SETTLED_SECONDS = 5.0  # the server gives memory back a second after large requests
LONGEST_PROMPT, STEP_OF_LENGTHS = 2000, 16  # tokens of the good prompts before the hostile ones
TRIES, STOLEN_SECONDS = 5, 0.03  # a body is measured again, so often at most, where the host took more than that
REFUSED = frozenset({400, 413})
OF_NUMBER = (b"the body is too large", b"should have at most", b"are accepted")  # of errors about the number of parts
TEXTS = 2048  # that good requests have embedded at once
ALLOWED = frozenset({503, 504})  # overloaded or loading, and a deadline of the client's own

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it tests the HTTP server, which is the same for any device that the engine runs on"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--requests", type=int, default=10_000, help="hostile requests in all")
    parser.add_argument("--at-once", type=int, default=16, help="requests at the same time")
    parser.add_argument("--bombers", type=int, default=8, help="clients that have bombs compiled beside the streams")
    parser.add_argument("--streams", type=int, default=4, help="streams whose tokens are timed")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of each stream, in each round")


def run(options: argparse.Namespace) -> Report:
    """Attack a server in each way, and count what came of it."""
    requests, largest = (300, 200_000) if options.quick else (options.requests, LARGEST)
    worst = 2 if options.quick else None  # so many of the largest bodies; None: all
    with served(options) as server:
        ready = server.settled()
        expected = asyncio.run(server.ask())
        # Good requests first: keys and values of as many sequences, what is imported when it is first needed, and the
        # kernels that libraries of the host compile, and keep, for each number of rows of a step.
        asyncio.run(Storm(server, options.seed, largest, "good").come(requests // 50, options.at_once))
        asyncio.run(server.ask_long())
        begun = server.settled()
        storm = Storm(server, options.seed, largest)
        with asked_for_health(server.port) as health:
            asyncio.run(storm.come(requests, options.at_once))
        large = [(name, COMPLETIONS, raw) for name, raw in largest_bodies(server.model, largest).items()]
        large += [(name, path, raw) for name, (path, raw) in largest_of_routes(server.model, largest).items()]
        bodies = [body_row(server, *body) for body in large[:worst]]
        dense = [dense_row(server, name, *made) for name, made in list(dense_bodies(server.model).items())[:worst]]
        gaps = asyncio.run(token_gaps(server, options)) if not options.quick else []
        answered = asyncio.run(server.ask())
        held = asyncio.run(positions_held(server.port))
        ended = server.settled()
        alive = server.process.poll() is None
        tracebacks = server.log.read_text(errors="replace").count("Traceback (most recent call last)")
    longest = max(health[0], *(row[3] for row in bodies + dense))
    growth = max(row[2] for row in bodies + dense)
    limits = [
        Limit("answers of 500 or above, but for 503 and 504", storm.failures, "==", 0, "count"),
        Limit("good answers that were wrong", storm.wrong + (answered != expected), "==", 0, "count"),
        Limit("processes that ended, and tracebacks", tracebacks + (not alive), "==", 0, "count"),
        Limit("sequences and positions held afterwards", held, "==", 0, "count"),
        Limit("longest error answer", storm.longest_error, "<=", 1024, "bytes"),
    ]
    if not options.quick:
        limits += [
            Limit("slowest answer of /health", longest, "<=", 0.1, "seconds"),
            Limit("memory for a body over its size, or over a MiB", growth, "<=", 4),
            Limit("memory afterwards over before", ended / begun, "<=", 1.1),
            Limit("time of a token beside compiled bombs over without", gap_growth(gaps), "<=", 1.1),
        ]
    return Report(
        "hostile",
        options.device,
        settings={"requests": requests, "at_once": options.at_once, "bombers": options.bombers},
        tables=tables(storm, bodies, dense, gaps, f"{requests} hostile requests, {options.at_once} at once"),
        limits=limits,
        notes=[
            f"/health: {health[1]:.0f} answers in the storm, the slowest after {health[0] * 1e3:.0f} ms",
            f"memory: {ready / 2**20:.0f} MiB when it was ready, {begun / 2**20:.0f} after good requests, "
            f"{storm.peak / 2**20:.0f} at its peak in the storm, {ended / 2**20:.0f} afterwards",
        ],
    )


def tables(
    storm: Storm, bodies: list[list[Any]], dense: list[list[Any]], gaps: list[list[Any]], title: str
) -> list[Table]:
    """Statuses by kind of request, memory and /health by body, seconds of a token by round."""
    statuses = sorted({status for kind in KINDS for status in storm.statuses[kind]})
    columns = [Column("kind"), *(Column(str(status) if status else "closed", "count") for status in statuses)]
    rows: list[list[Any]] = [[kind, *(storm.statuses[kind][status] for status in statuses)] for kind in KINDS]
    names = [
        *(Column("body"), Column("size", "bytes"), Column("memory over size", "ratio")),
        *(Column("slowest /health", "seconds"), Column("answered after", "seconds"), Column("status", "count")),
    ]
    found = [
        Table(title, columns, rows),
        Table("The largest bodies, one by one", names, bodies),
        Table("Bodies of as many parts as are taken", names, dense),
    ]
    if gaps:
        compared = [Column("round", "count"), Column("a token", "seconds"), Column("beside bombs", "seconds")]
        found.append(Table("Streams beside clients that have bombs compiled", compared, gaps))
    return found


# --- the server ---------------------------------------------------------------------------------------


@dataclass
class HostileServer:
    """A running server, and what is known of it from outside."""

    process: subprocess.Popen[bytes]
    port: int
    model: str
    log: Path

    def memory(self) -> int:
        """Resident bytes of the process."""
        return self._status("VmRSS")

    def settled(self) -> int:
        """Resident bytes once they have not fallen for some seconds."""
        least, since = self.memory(), time.monotonic()
        while time.monotonic() - since < SETTLED_SECONDS:
            time.sleep(0.5)
            now = self.memory()
            if now < 0.99 * least:
                least, since = now, time.monotonic()
        return now

    def peak(self, *, anew: bool = False) -> int:
        """Most resident bytes, since it was last asked ``anew``."""
        if anew:
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self._status("VmHWM")

    async def ask(self) -> list[str]:
        """Texts of a few greedy requests."""
        texts = []
        for number in range(4):
            body = {"model": self.model, "prompt": [number + 1] * 20, "max_tokens": 16, "temperature": 0}
            status, answer = await exchange(self.port, post(COMPLETIONS, json.dumps(body).encode()))
            texts.append(json.loads(answer)["choices"][0]["text"] if status == 200 else f"status {status}")
        return texts

    async def ask_long(self) -> None:
        """Ask prompts of all lengths, one after the other, and embeddings of many texts."""
        for length in range(STEP_OF_LENGTHS, LONGEST_PROMPT, STEP_OF_LENGTHS):
            body = {"model": self.model, "prompt": [2] * length, "max_tokens": 2, "temperature": 0}
            status, answer = await exchange(self.port, post(COMPLETIONS, json.dumps(body).encode()))
            if status != 200:
                raise BenchmarkError(f"a prompt of {length} tokens was answered {status}: {answer[:300].decode()}")
        texts = {"model": self.model, "input": ["3 2"] * TEXTS}
        status, answer = await exchange(self.port, post(EMBEDDINGS, json.dumps(texts).encode()))
        if status != 200:
            raise BenchmarkError(f"{TEXTS} texts were answered {status}: {answer[:300].decode()}")

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition(f"{name}:")[2].split()[0]) << 10


@contextlib.contextmanager
def served(options: argparse.Namespace) -> Iterator[HostileServer]:
    """`bigmodel serve` over a tiny model, accepting bodies of any size that is tried."""
    folder = checkpoint(options.workdir / "serve", "2x64", options.seed)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from bigmodel.cli.main import main; sys.exit(main())", "serve"]
    command += [str(folder), "--port", str(port), "--max-memory", "cpu=8GiB", "--no-prefix-cache"]
    command += ["--max-body", "16MiB", "--request-timeout", "30", "--log-level", "warning"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads or 1)}
    log = options.workdir / "hostile.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        server = HostileServer(process, port, folder.name, log)
        asyncio.run(_ready(server))
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def _ready(server: HostileServer) -> None:
    while server.process.poll() is None:
        with contextlib.suppress(OSError, IndexError, ValueError):
            if (await exchange(server.port, get("/ready")))[0] == 200:
                return
        await asyncio.sleep(0.1)
    raise BenchmarkError(f"bigmodel serve did not start: {server.log.read_text(errors='replace')[-300:]}")


@contextlib.contextmanager
def asked_for_health(port: int) -> Iterator[list[float]]:
    """Another process asks /health within this context; afterwards: seconds of the slowest answer, and their number."""
    found: list[float] = []
    command = [sys.executable, "-m", f"{__package__}.hostile_probe", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(import_folder())}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as probe:
        try:
            yield found
        finally:
            answer, _ = probe.communicate()
    found += map(float, answer.split())


# --- the storm ----------------------------------------------------------------------------------------


async def send(port: int, attack: Attack) -> tuple[int, bytes]:
    """Status and body of the answer; status 0 where the connection was closed without one, or left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(attack.raw)
            await writer.drain()
        if attack.leaves:
            with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(1), 0.05)
            return 0, b""
        answer = b""
        try:
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
        except ConnectionError:
            pass
        except asyncio.TimeoutError:
            return NO_ANSWER, b""
    finally:
        writer.transport.abort()
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return status, unchunked(body) if b"transfer-encoding: chunked" in head.lower() else body


@dataclass
class Storm:
    """Hostile requests, of all kinds if none is given, and what was answered."""

    server: HostileServer
    seed: int
    largest: int
    kind: str | None = None
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    failures: int = 0
    wrong: int = 0
    longest_error: int = 0
    peak: int = 0

    async def come(self, requests: int, at_once: int) -> None:
        """Send so many requests, ``at_once`` at a time."""
        rng = random.Random(self.seed)
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                await self._one(draw(rng, self.server.model, largest=self.largest, kind=self.kind))

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def _one(self, attack: Attack) -> None:
        status, body = await send(self.server.port, attack)
        self.statuses[attack.kind][status] += 1
        self.failures += status >= 500 and status not in ALLOWED
        self.wrong += attack.kind == "good" and status not in (200, 429, 503)
        if status >= 400:
            self.longest_error = max(self.longest_error, len(body))
        self.peak = max(self.peak, self.server.memory())


# --- the largest bodies -------------------------------------------------------------------------------


def body_row(server: HostileServer, name: str, path: str, body: bytes) -> list[Any]:
    """A row about one body: size, memory over size (that of a smaller one counts as `LEAST_BODY`), slowest /health
    meanwhile, seconds to the answer, status.

    It is measured again where the host of a virtual machine took processors away meanwhile, which holds up everything.
    """
    for _ in range(TRIES):
        stolen = stolen_seconds()
        row = _body_row(server, name, path, body)
        if stolen_seconds() - stolen <= STOLEN_SECONDS:
            break
    return row


def _body_row(server: HostileServer, name: str, path: str, body: bytes) -> list[Any]:
    before = server.settled()
    server.peak(anew=True)
    with asked_for_health(server.port) as health:
        time.sleep(0.3)  # the other process has begun to ask
        begun = time.perf_counter()
        status, _ = asyncio.run(send(server.port, Attack(name, post(path, body))))
        seconds = time.perf_counter() - begun
    grown = max(0.0, (server.peak() - before) / max(LEAST_BODY, len(body)))
    return [name, len(body), grown, health[0], seconds, status]


def stolen_seconds() -> float:
    """Seconds for which the host of a virtual machine has run others on its processors."""
    steal = Path("/proc/stat").read_text().split(maxsplit=9)[8]  # of all processors: proc_stat(5)
    return int(steal) / os.sysconf("SC_CLK_TCK")


def dense_row(server: HostileServer, name: str, path: str, made: Callable[[int], bytes]) -> list[Any]:
    """A row about the body with the most parts, of at most `LARGEST` bytes, that is not refused for their number.

    Such bodies were sent before: what a server keeps of a first one is counted as memory afterwards.
    """

    def taken(count: int) -> bool:
        status, answer = asyncio.run(send(server.port, Attack(name, post(path, made(count)))))
        return status not in REFUSED or not any(words in answer for words in OF_NUMBER)

    least, most = 1, LARGEST * 1000 // len(made(1000))
    if taken(most):
        least = most
    while most > 1.05 * least:
        middle = math.ceil((least * most) ** 0.5)
        least, most = (middle, most) if taken(middle) else (least, middle)
    return body_row(server, f"{least} {name}", path, made(least))


# --- tokens beside bombs ------------------------------------------------------------------------------


async def token_gaps(server: HostileServer, options: argparse.Namespace) -> list[list[Any]]:
    """Seconds of a token in each round, without and beside clients that have bombs compiled."""
    rng = random.Random(options.seed)
    rows = []
    for number in range(options.rounds):
        row: list[Any] = [number + 1]
        for bombers in (0, options.bombers):
            # Schemas are compiled one after the other: once this one is, none of an earlier round is left.
            last = chat(server.model, {"type": "string", "pattern": f"^{rng.randrange(10**9)}$"})
            await send(server.port, Attack("last", post(CHAT, json.dumps(last).encode())))
            bombing = [asyncio.ensure_future(_bombs(server, rng)) for _ in range(bombers)]
            await asyncio.sleep(0.5)
            row.append(await _seconds_of_a_token(server, options.streams, options.tokens))
            for task in bombing:
                task.cancel()
            await asyncio.gather(*bombing, return_exceptions=True)
        rows.append(row)
    return rows


def gap_growth(gaps: list[list[Any]]) -> float:
    """The median over rounds of the time beside bombs over that without."""
    return statistics.median(beside / alone for _, alone, beside in gaps)


async def _bombs(server: HostileServer, rng: random.Random) -> None:
    while True:
        await send(server.port, Attack("bomb", post(CHAT, json.dumps(chat(server.model, bomb(rng))).encode())))
        await asyncio.sleep(0.05)


async def _seconds_of_a_token(server: HostileServer, streams: int, tokens: int) -> float:
    """Mean seconds between two tokens of the same stream."""
    body = {"model": server.model, "prompt": [2] * 16, "max_tokens": tokens, "ignore_eos": True, "stream": True}

    async def one() -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(COMPLETIONS, json.dumps(body).encode()))
        await reader.readuntil(b"data: ")
        begun = time.perf_counter()
        rest = await reader.read()
        seconds = time.perf_counter() - begun
        writer.close()
        if b"[DONE]" not in rest:
            raise BenchmarkError("a stream did not come to its end")
        return seconds / (tokens - 1)

    return statistics.mean(await asyncio.gather(*(one() for _ in range(streams))))
