"""How much CPU time does HTTP take per streamed token, in addition to the engine?

The engine runs a model that takes no time, first with its events read in the same process, then served and streamed to
clients in another process. The difference in the server process's CPU time, divided by the tokens, is the cost of HTTP:
detokenizing, JSON, and the socket.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from .harness import Column, Limit, Report, Table, Variant, measure, run_isolated
from .serve_client import read_streams
from .serve_model import VOCABULARY, PromptJob, random_llama, run_jobs, started_engine, word_tokenizer

LIMIT = 60e-6
ENGINE, HTTP = "engine alone", "streamed over HTTP"

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it measures the HTTP server, under a model that takes no time on any device"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--streams", type=int, default=16, help="clients at once")
    parser.add_argument("--tokens", type=int, default=400, help="tokens that each reads")


def run(options: argparse.Namespace) -> Report:
    """Measure CPU seconds per token with and without HTTP; report the difference."""
    tokens = 50 if options.quick else options.tokens
    total = options.streams * tokens
    variants = [
        Variant(ENGINE, lambda: _engine(options.streams, tokens) / total),
        Variant(HTTP, lambda: _http(options.streams, tokens) / total),
    ]
    samples = measure(variants, options.rounds, seed=options.seed)
    cost = samples.median(HTTP) - samples.median(ENGINE)
    rows: list[list[Any]] = [[name, samples.median(name)] for name in (ENGINE, HTTP)]
    table = Table(
        f"{options.streams} streams of {tokens} tokens, CPU time of the serving process for each token",
        [Column("way"), Column("a token", "seconds")],
        [*rows, ["difference: HTTP", cost]],
    )
    return Report(
        "serve_http",
        options.device,
        settings={"streams": options.streams, "tokens": tokens},
        tables=[table],
        limits=[]
        if options.quick
        else [Limit("CPU seconds of HTTP for each streamed token", cost, "<=", LIMIT, "seconds")],
        notes=["every token is an event of its own; clients run in a process of their own"],
        samples={"cpu": samples},
    )


class Instant:
    """A runner whose model is a constant: token 1 is always the likeliest."""

    name = "instant"
    row_multiple = 1
    adapters: Any = None
    host_linear: Any = "torch"

    def __init__(self) -> None:
        import torch

        self._row = torch.zeros(1, VOCABULARY)
        self._row[0, 1] = 1.0

    def run(self, batch: Any) -> list[Any]:
        return [self._row if scheduled.samples else None for scheduled in batch]

    def bytes_per_token(self) -> dict[str, int]:
        return {"cpu": 1}

    def probe(self) -> None: ...


def _instant_engine(streams: int) -> Any:
    engine = started_engine(random_llama("2x64"), max_sequences=streams, max_batch_tokens=streams + 256)
    engine.core.runner = Instant()
    return engine


def _engine(streams: int, tokens: int) -> float:
    """CPU seconds of the engine alone."""
    engine = _instant_engine(streams)
    jobs = [PromptJob([2] * 16, tokens) for _ in range(streams)]
    try:
        run_jobs(engine, jobs)
        begun = time.process_time()
        run_jobs(engine, jobs)
        return time.process_time() - begun
    finally:
        engine.stop()


def _http(streams: int, tokens: int) -> float:
    """CPU seconds of this process while it serves clients that run in another."""
    with serving_instantly(streams) as port:
        run_isolated(read_streams, port=port, streams=streams, tokens=8)
        begun = time.process_time()
        run_isolated(read_streams, port=port, streams=streams, tokens=tokens)
        return time.process_time() - begun


@contextlib.contextmanager
def serving_instantly(streams: int) -> Iterator[int]:
    """The real application over an engine whose model takes no time; its port."""
    model, tokens = random_llama("2x64"), streams + 256
    with served(model, word_tokenizer(), max_sequences=streams, max_batch_tokens=tokens) as (port, app):
        app.state.server.first.running.engine.core.runner = Instant()
        yield port


@contextlib.contextmanager
def served(model: Any, tokenizer: Any, **engine: Any) -> Iterator[tuple[int, Any]]:
    """The application over ``model`` on a free loopback port, in a thread: (port, application)."""
    import uvicorn

    from bigmodel.server import EngineOptions, Settings, create_app
    from bigmodel.server.http.run import bind

    options = EngineOptions(**{"kv_bytes": 1 << 30, **engine})
    app = create_app(model, tokenizer, settings=Settings("model", engine=options))
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], app
    finally:
        server.should_exit = True
        thread.join()
