"""How many tokens per second does `bigmodel serve` give, beside `transformers serve --continuous-batching`?

Both run as separate processes on the same checkpoint, started by their commands. The same prompts of ragged lengths are
sent to each as a Poisson stream; the other server is paused meanwhile (SIGSTOP).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .harness import Column, Limit, Report, Table, Variant, measure
from .serve_client import completion, exchange
from .serve_model import PromptJob, ragged_jobs, random_llama, word_tokenizer

OURS, PEER = "bigmodel serve", "transformers serve --continuous-batching"
MAIN_MODULES = {OURS: "bigmodel.cli.main", PEER: "transformers.cli.transformers"}

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "both servers are held to the host; `serve-throughput` measures the engine on an accelerator"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 8x1024, 4x512, 2x64")
    parser.add_argument("--requests", type=int, default=16, help="requests")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--per-second", type=float, default=40.0, help="arrivals a second of the Poisson stream")
    parser.add_argument("--no-peer", action="store_true", help="measure bigmodel alone")


def run(options: argparse.Namespace) -> Report:
    """Measure the tokens per second of both servers."""
    size, tokens = (options.size or "2x64", 4) if options.quick else (options.size or "8x1024", options.tokens)
    names = [OURS] if options.no_peer else [OURS, PEER]
    jobs = ragged_jobs(options.requests, seed=options.seed, tokens=tokens, per_second=options.per_second)
    folder = checkpoint(options.workdir / "serve", size, options.seed)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(serving(name, folder, options.threads)) for name in names]
        variants = [Variant(peer.name, lambda peer=peer: peer.seconds(jobs)) for peer in peers]  # type: ignore[misc]
        samples = measure(variants, options.rounds, seed=options.seed)
    rows: list[list[str | float]] = [[name, len(jobs) * tokens / samples.median(name)] for name in names]
    limits = []
    if PEER in names and not options.quick:
        limits = [Limit("tokens/s over those of transformers serve", samples.ratio(PEER, OURS).median, ">=", 2)]
    return Report(
        "serve_peer",
        options.device,
        settings={"size": size, "requests": len(jobs), "tokens": tokens, "per_second": options.per_second},
        tables=[
            Table(
                f"{len(jobs)} requests of {tokens} tokens, a Llama of {size}",
                [Column("server"), Column("tokens/s", "count")],
                rows,
            )
        ],
        limits=limits,
        samples={"run": samples},
    )


def checkpoint(folder: Path, size: str, seed: int, tokenizer: Any = None) -> Path:
    """A folder with random weights and a tokenizer (None: of words that are numbers); made when it is not there."""
    path = folder / f"{size}-{seed}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=path.parent))
        random_llama(size, seed).save_pretrained(new)
        if tokenizer is None:
            tokenizer = word_tokenizer()
            tokenizer.pad_token = "0"
        tokenizer.save_pretrained(new)
        new.rename(path)
    return path


@dataclass(frozen=True)
class Server:
    """A server process that is paused except while it is measured."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    model: str

    def seconds(self, jobs: list[PromptJob]) -> float:
        """Seconds from the first request sent to the last answer read."""
        self.process.send_signal(signal.SIGCONT)
        try:
            return asyncio.run(send(self.port, self.model, jobs))
        finally:
            self.process.send_signal(signal.SIGSTOP)


@contextlib.contextmanager
def serving(name: str, folder: Path, threads: int | None) -> Iterator[Server]:
    """One of the two servers over the checkpoint in ``folder``, warm."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = ["--max-memory", "cpu=8GiB", "--no-prefix-cache", "--log-level", "warning"]
    theirs = ["--continuous-batching", "--device", "cpu", "--dtype", "float32", "--log-level", "warning"]
    command = [sys.executable, "-c", f"import sys; from {MAIN_MODULES[name]} import main; sys.exit(main())"]
    command += ["serve", str(folder), "--port", str(port), *(ours if name == OURS else theirs)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_until_ready(name, "ready" if name == OURS else "health", process, port, log)
            server = Server(name, process, port, folder.name if name == OURS else str(folder))
            server.seconds(ragged_jobs(2, seed=1, tokens=4))
            yield server
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait()


def wait_until_ready(name: str, path: str, process: subprocess.Popen[bytes], port: int, log: object) -> None:
    """Wait until a server answers GET /PATH. Raises RuntimeError with its last line if it ends, or takes too long."""
    for _ in range(1200):
        # A server that is loading refuses connections or answers with an error; both raise here.
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}"):
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    log.seek(0)  # type: ignore[attr-defined]
    last = log.read().decode(errors="replace").strip().splitlines()[-1:]  # type: ignore[attr-defined]
    raise RuntimeError(f"{name} did not start: {' '.join(last) or 'no output in two minutes'}")


async def send(port: int, model: str, jobs: list[PromptJob]) -> float:
    """Send every job at its time and read its answer; seconds from the first to the last."""
    begun = time.perf_counter()

    async def one(job: PromptJob) -> None:
        await asyncio.sleep(max(0.0, begun + job.arrives - time.perf_counter()))
        body = {"model": model, "prompt": " ".join(map(str, job.prompt)), "max_tokens": job.tokens, "temperature": 0}
        status, answer = await exchange(port, completion(body))
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {answer[:300].decode()}")
        made = json.loads(answer)["usage"]["completion_tokens"]
        if made != job.tokens:
            raise RuntimeError(f"{made} tokens were generated instead of {job.tokens}")

    await asyncio.gather(*(one(job) for job in jobs))
    return time.perf_counter() - begun
