"""Can a model twice the size of the host's budget run, within it, at the speed of the disk?

Every value is measured in a separate process that loads the model under ``max_memory={"cpu": budget}``. Pages that the
process releases are also evicted from the page cache, where the kernel would otherwise keep them. A step then reads
from disk all weights that are not in the process's memory, as on a machine with no more memory than the budget. The
lower bound of the bytes read is the weights used by a step, less the budget without the process itself.

Two rates are compared with a raw reader of the whole model. First, bytes of weights used by a step per second: weights
that stay in memory are not read, so this may exceed the disk's bandwidth. Second, bytes read from disk per second:
reading and computing share the processor, so the reader runs beside a model in memory that computes equally much per
byte and does not wait for the disk.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from .harness import Column, Limit, Report, Samples, Table, Variant, measure, run_isolated
from .harness.pagecache import advise_out, evict
from .harness.rawread import POPULATE, READERS, read_beside
from .harness.report import Cell

OURS = "bigmodel"
BESIDE = "raw reader beside a model in memory"
RATE = "bytes per second"
SPEED, MEMORY = 0.9, 1.05

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it runs a model within a budget of host memory; `memory` measures budgets of accelerators"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", nargs="?", default=None, help="llama-1b, or a folder (default: llama-1b)")
    parser.add_argument("--share", type=float, default=0.5, help="budget as a share of the model's bytes")
    parser.add_argument("--steps", type=int, default=4, help="steps of each process")
    parser.set_defaults(rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Measure raw readers and runs under the budget in the same rounds."""
    from .checkpoints import checkpoint

    folder = checkpoint(options.model or ("tiny" if options.quick else "llama-1b"), options.workdir)
    shards = sorted(folder.glob("*.safetensors"))
    total = sum(shard.stat().st_size for shard in shards)
    # A process with torch takes half a gigabyte, which the budget of a small model must include.
    budget = int(options.share * total) + (2**30 if options.quick else 0)
    ours = partial(run_isolated, run_within, folder=str(folder), budget=budget, steps=options.steps)
    variants = [Variant(name, partial(_read, name, shards), partial(evict, shards)) for name in READERS]
    # As many steps as the reads of one step fit into the bytes of the model.
    parts = round(total / (total - budget)) if budget < total else 1
    beside = partial(run_isolated, run_beside, folder=str(folder), steps=parts)
    variants.append(Variant(BESIDE, beside, partial(evict, shards)))
    variants.append(Variant(OURS, ours, partial(evict, shards)))
    samples = measure(variants, options.rounds, warmup=0, seed=options.seed)
    return _report(options, folder, samples, budget, total)


def run_within(folder: str, budget: int, steps: int) -> dict[str, float]:
    """Load under a budget of host memory and run steps with a cold page cache. Called in a fresh process.

    Returns:
        Median seconds of a step, peak RSS (bytes), bytes that a step reads from disk, the lower bound of these, bytes
        of the largest block, and bytes of weights that a step uses.
    """
    import statistics

    import torch

    from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory

    from . import models
    from .harness.evict_behind import evicting_behind

    models.warm_up()
    before = memory_allocated("cpu")
    reset_peak_memory("cpu")
    model = models.ours(Path(folder), "auto", max_memory={"cpu": budget}, context_length=64)
    shards = sorted(Path(folder).glob("*.safetensors"))
    seconds, read = [], []
    with evicting_behind():
        for number in range(steps + 1):
            for shard in shards:
                advise_out(shard)
            taken, nbytes = _step(model, torch.ones(1, 1, dtype=torch.long))
            if number:
                seconds.append(taken)
                read.append(nbytes)
    used = used_bytes(model)
    return {
        "seconds": statistics.median(seconds),
        "peak": max_memory_allocated("cpu"),
        "before": before,
        "read": statistics.median(read),
        "least": max(0, used - max(0, budget - before)),
        "block": max(sum(p.nbytes for p in layer.parameters()) for layer in _layers(model)),
        "used": used,
    }


def run_beside(folder: str, steps: int, repeat: int = 3) -> dict[str, float]:
    """Read all shards, cold, while a model in memory runs `steps` steps. Called in a fresh process.

    Returns:
        Median seconds of both together, and bytes read per second.
    """
    import statistics

    import torch

    from . import models
    from .harness import elapsed

    models.warm_up()
    model, token = models.resident(Path(folder)), torch.ones(1, 1, dtype=torch.long)
    shards = sorted(Path(folder).glob("*.safetensors"))

    def compute() -> None:
        for _ in range(steps):
            _step(model, token)

    compute()
    seconds = []
    for _ in range(repeat):
        evict(shards)
        seconds.append(elapsed(lambda: read_beside(compute, POPULATE, shards)))
    nbytes = sum(shard.stat().st_size for shard in shards)
    return {"seconds": statistics.median(seconds), RATE: nbytes / statistics.median(seconds)}


def used_bytes(model: Any) -> int:
    """Return the bytes of weights that a step of one token uses: all but the other rows of the embedding."""
    embedding = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not embedding)


def _layers(model: Any) -> list[Any]:
    return list(model.model.layers)


def _step(model: Any, token: Any) -> tuple[float, int]:
    import torch

    from .harness import elapsed

    before = _bytes_read()
    with torch.inference_mode():
        seconds = elapsed(lambda: model(input_ids=token, use_cache=False))
    return seconds, _bytes_read() - before


def _bytes_read() -> int:
    """Return the bytes that were read from disk for this process so far."""
    import psutil

    return int(psutil.Process().io_counters().read_bytes)


def _read(name: str, files: list[Path]) -> dict[str, float]:
    from .harness import elapsed

    nbytes = sum(file.stat().st_size for file in files)
    seconds = elapsed(lambda: READERS[name](files))
    return {"seconds": seconds, RATE: nbytes / seconds}


def _report(options: argparse.Namespace, folder: Path, samples: Samples, budget: int, total: int) -> Report:
    best = max(READERS, key=lambda name: samples.median(name, RATE))
    raw = samples.median(best, RATE)
    figures = {
        name: samples.median(OURS, name) for name in ("seconds", "peak", "before", "read", "least", "block", "used")
    }
    rows: list[list[Cell]] = [
        [name, "", samples.median(name), rate, rate / raw]
        for name in (*READERS, BESIDE)
        for rate in [samples.median(name, RATE)]
    ]
    for counted, what in (("read", "bytes read from disk"), ("least", "bytes it had to read"), ("used", "all it uses")):
        rate = figures[counted] / figures["seconds"]
        rows.append([OURS, what, figures["seconds"], rate, rate / raw])
    speeds = Table(
        f"A step of {folder.name.rpartition('-')[0]} in {options.share:g} of its memory",
        [
            Column("variant"),
            Column("rate of"),
            Column("seconds", "seconds"),
            Column("rate", "rate"),
            Column("over raw", "ratio"),
        ],
        rows,
    )
    memory: list[list[Cell]] = [
        ["model", total],
        ["budget", budget],
        ["largest block", figures["block"]],
        ["process before loading", figures["before"]],
        ["highest resident set", figures["peak"]],
        ["read by a step", figures["read"]],
        ["least that it had to read", figures["least"]],
    ]
    peak, allowed = max(samples.of(OURS, "peak")), MEMORY * budget + figures["block"]
    limits = [Limit("highest resident set within budget, one block and 5 %", peak, "<=", allowed, "bytes")]
    step = figures["used"] / figures["seconds"]
    limits.append(Limit(f"weights used by a step, per second, over {best}", step / raw, ">=", SPEED))
    # The lower bound is used: reading more, or finding boundary pages in the cache, does not improve the figure.
    needed = min(figures["least"], figures["read"])
    if needed:
        share = needed / figures["seconds"] / samples.median(BESIDE, RATE)
        limits.append(Limit(f"bytes it had to read, per second, over {BESIDE}", share, ">=", SPEED))
    return Report(
        "budget",
        options.device,
        settings={"model": folder.name, "budget": budget, "steps": options.steps},
        tables=[speeds, Table("Memory, medians", [Column("what"), Column("bytes", "bytes")], memory)],
        limits=limits,
        samples={"step": samples},
    )
