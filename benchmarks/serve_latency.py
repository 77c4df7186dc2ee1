"""How long do the first token and the intervals between tokens take under load?

Requests arrive as a Poisson stream, at a rate that keeps the engine busy; percentiles over all of them.
"""

from __future__ import annotations

import argparse

from .harness import Column, Report, Samples, Table
from .serve_model import ragged_jobs, run_jobs, served_llama, started_engine

_PERCENTILES = (50, 95, 99)

DEVICES = ("cpu", "cuda", "virtual")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 16x2048, 8x1024, 4x512, 2x64")
    parser.add_argument("--requests", type=int, default=60, help="requests")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--per-second", type=float, default=4.0, help="arrivals a second")
    parser.add_argument("--batch-tokens", type=int, default=256, help="tokens of one step")


def run(options: argparse.Namespace) -> Report:
    """Measure times to the first and between tokens."""
    size, model = served_llama(options)
    requests = 10 if options.quick else options.requests
    jobs = ragged_jobs(requests, seed=options.seed, tokens=options.tokens, per_second=options.per_second)
    engine = started_engine(model, max_sequences=16, max_batch_tokens=options.batch_tokens)
    try:
        run_jobs(engine, jobs[:2])
        seconds, sinks = run_jobs(engine, jobs)
    finally:
        engine.stop()
    first = [sink.arrivals[0] - sink.sent for sink in sinks]
    between = [b - a for sink in sinks for a, b in zip(sink.arrivals, sink.arrivals[1:], strict=False)]
    rows: list[list[str | float]] = [["first token", *percentiles(first)], ["between tokens", *percentiles(between)]]
    table = Table(
        f"{requests} requests at {options.per_second:g} a second, a Llama of {size}: "
        f"{requests * options.tokens / seconds:.0f} tokens/s in all",
        [Column("time"), *(Column(f"p{p}", "seconds") for p in _PERCENTILES)],
        rows,
    )
    samples = Samples()
    for name, values in (("first token", first), ("between tokens", between)):
        for value in values:
            samples.add(name, value)
    settings = {"size": size, "requests": requests, "tokens": options.tokens, "per_second": options.per_second}
    return Report("serve_latency", options.device, settings=settings, tables=[table], samples={"times": samples})


def percentiles(values: list[float]) -> list[float]:
    """p50, p95 and p99: the smallest value that so many per cent do not exceed."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, -(-len(ordered) * p // 100) - 1)] for p in _PERCENTILES]
