"""How many tokens per second does the engine generate for arriving requests, beside offline static batching?

Sixteen prompts of ragged lengths arrive as a Poisson stream. Offline static batching has them all from the start,
pads them to one length and runs `generate` once; sequential runs `generate` for each. Padding costs static batching
some of its time, so sixteen prompts of equal length, which need none, are compared too.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Table, Variant, measure
from .serve_model import PromptJob, equal_jobs, ragged_jobs, run_jobs, served_llama, started_engine

if TYPE_CHECKING:
    from bigmodel.server.engine import Engine

    from .harness import Samples

STREAM = "engine, Poisson arrivals"
AT_ONCE = "engine, all at once"
STATIC = "offline static batching"
SEQUENTIAL = "one after another"
EQUAL = "engine, equal lengths"
EQUAL_STATIC = "offline static batching, equal lengths"

DEVICES = ("cpu", "cuda", "virtual")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 16x2048, 8x1024, 4x512, 2x64")
    parser.add_argument("--requests", type=int, default=16, help="requests")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--per-second", type=float, default=40.0, help="arrivals a second of the Poisson stream")


def run(options: argparse.Namespace) -> Report:
    """Measure tokens per second and compare the stream with offline static batching."""
    size, model = served_llama(options)
    at_once = ragged_jobs(options.requests, seed=options.seed, tokens=options.tokens)
    stream = ragged_jobs(options.requests, seed=options.seed, tokens=options.tokens, per_second=options.per_second)
    equal = equal_jobs(options.requests, seed=options.seed, tokens=options.tokens)
    total = options.requests * options.tokens
    variants = [
        Variant(STATIC, lambda: static_batch(model, at_once)),
        Variant(SEQUENTIAL, lambda: one_by_one(model, at_once)),
        Variant(EQUAL_STATIC, lambda: static_batch(model, equal)),
    ]
    engine = started_engine(served_llama(options)[1], max_sequences=options.requests, prefix_cache=False)
    variants += [
        Variant(STREAM, lambda: engine_seconds(engine, stream)),
        Variant(AT_ONCE, lambda: engine_seconds(engine, at_once)),
        Variant(EQUAL, lambda: engine_seconds(engine, equal)),
    ]
    try:
        samples = measure(variants, options.rounds, seed=options.seed)
    finally:
        engine.stop()
    return _report(options, size, samples, total)


def engine_seconds(engine: Engine, jobs: list[PromptJob]) -> float:
    """Seconds of a run; the time of waiting for the last arrival is part of it."""
    return run_jobs(engine, jobs)[0]


def static_batch(model: Any, jobs: list[PromptJob]) -> float:
    """All prompts padded to one length, one `generate`."""
    import torch

    longest = max(len(job.prompt) for job in jobs)
    ids = torch.tensor([[0] * (longest - len(job.prompt)) + job.prompt for job in jobs])
    mask = torch.tensor([[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in jobs])
    return _generate(model, ids, mask, jobs[0].tokens)


def one_by_one(model: Any, jobs: list[PromptJob]) -> float:
    """A `generate` for each prompt."""
    import torch

    return sum(
        _generate(model, torch.tensor([job.prompt]), torch.ones(1, len(job.prompt), dtype=torch.long), job.tokens)
        for job in jobs
    )


def _generate(model: Any, ids: Any, mask: Any, tokens: int) -> float:
    import torch

    begun = time.perf_counter()
    with torch.inference_mode():
        ids, mask = ids.to(model.device), mask.to(model.device)
        model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return time.perf_counter() - begun


def _report(options: argparse.Namespace, size: str, samples: Samples, total: int) -> Report:
    rows: list[list[str | float]] = [
        [name, total / samples.median(name), samples.ratio(static, name).median]
        for static, names in ((STATIC, (STREAM, AT_ONCE, STATIC, SEQUENTIAL)), (EQUAL_STATIC, (EQUAL, EQUAL_STATIC)))
        for name in names
    ]
    table = Table(
        f"{options.requests} requests of {options.tokens} tokens, a Llama of {size}",
        [Column("way"), Column("tokens/s", "count"), Column("of static batching", "ratio")],
        rows,
    )
    limits = [
        Limit("stream over offline static batching", samples.ratio(STATIC, STREAM).median, ">=", 0.9),
        Limit("equal lengths over offline static batching", samples.ratio(EQUAL_STATIC, EQUAL).median, ">=", 0.9),
        Limit("stream over one after another", samples.ratio(SEQUENTIAL, STREAM).median, ">=", 4),
    ]
    settings = {"size": size, "requests": options.requests, "tokens": options.tokens, "per_second": options.per_second}
    return Report(
        "serve_throughput",
        options.device,
        settings=settings,
        tables=[table],
        limits=[] if options.quick else limits,
        notes=[
            "the engine pads rows so that a request gets the same bits alone and in a batch; its figures include that",
            "prompts have 16 to 200 tokens, which static batching pads to the longest; those of equal length have 108",
        ],
        samples={"run": samples},
    )
