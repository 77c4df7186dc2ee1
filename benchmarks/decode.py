"""How fast does a model decode with all its layers on disk, the page cache warm, beside the same model in memory?

With the CPU as execution device, weights that view the mapped checkpoint should be as fast as weights in memory.
"Resident" means anonymous memory here; weights that transformers loads to the CPU view the file, and are measured too.

The offset of a weight within its page affects matrix products whose rows are whole pages; for mapped weights the file
determines it. The model is therefore compared with one resident at the same offsets, and, after saving it with
`save_model`, which aligns weights to pages, with one resident wherever the allocator puts it.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, comparison_table, measure

if TYPE_CHECKING:
    from .steps import Decoder

OURS = "bigmodel, layers on disk"
RESIDENT = "resident, anonymous memory"
PLACED = "resident, at the same places in pages"
MAPPED = "transformers, mapped weights"
ACCELERATE = "accelerate, layers on disk"
INDEXED = "accelerate, layers in the shards"
LIMIT = 1.03

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it compares weights mapped from disk with weights in host memory; `offload` measures accelerators"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", nargs="?", default=None, help="llama-1b, llama-40, or a folder (default: llama-1b)")
    parser.add_argument("--steps", type=int, default=4, help="decode steps behind each value")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences at once")
    parser.add_argument("--no-peers", action="store_true", help="leave accelerate out")


def run(options: argparse.Namespace) -> Report:
    """Measure step times, check that logits are bitwise equal, and compare the times with the resident model's."""
    from .checkpoints import checkpoint

    folder = checkpoint(options.model or ("tiny" if options.quick else "llama-1b"), options.workdir)
    with tempfile.TemporaryDirectory(dir=options.workdir) as scratch:
        foreign = _measured(folder, options, Path(scratch), (PLACED,) if options.no_peers else (PLACED, ACCELERATE))
        saved = _measured(_saved_anew(folder, Path(scratch) / "saved"), options, Path(scratch), ())
    return _report(options, folder, foreign, saved)


@dataclass(frozen=True)
class _Measured:
    samples: Samples
    weights: int
    same_bits: bool


def _measured(folder: Path, options: argparse.Namespace, scratch: Path, others: tuple[str, ...]) -> _Measured:
    import torch

    from .harness.pagecache import evict, warm

    shards = sorted(folder.glob("*.safetensors"))
    # A file just written is in the page cache on small pages; after reading it back, on large ones, as after any load.
    evict(shards)
    warm(shards)
    decoders = _decoders(folder, options, scratch, others)
    same = torch.equal(decoders[OURS].logits(2), decoders[MAPPED].logits(2))
    variants = [Variant(name, partial(each.seconds_per_step, options.steps)) for name, each in decoders.items()]
    samples = measure(variants, options.rounds, seed=options.seed)
    return _Measured(samples, sum(p.nbytes for p in decoders[RESIDENT].model.parameters()), same)


def _saved_anew(folder: Path, target: Path) -> Path:
    """Save the model of `folder` with `save_model`, with its config."""
    from bigmodel.checkpoint import save_model

    from . import models

    model: Any = models.mapped(folder)
    save_model(model, target)
    model.config.save_pretrained(target)
    return target


def _decoders(folder: Path, options: argparse.Namespace, scratch: Path, others: tuple[str, ...]) -> dict[str, Decoder]:
    from . import models
    from .steps import Decoder

    device_map = models.layer_map(folder, layers="disk", rest="cpu")
    found = {
        RESIDENT: models.resident(folder),
        OURS: models.ours(folder, device_map),
        MAPPED: models.mapped(folder),
    }
    if PLACED in others:
        found[PLACED] = models.resident(folder, placed=True)
    if ACCELERATE in others:
        found[ACCELERATE] = models.accelerate_dispatched(folder, device_map, scratch / "dat")
        found[INDEXED] = models.accelerate_indexed(folder, device_map, scratch / "shards")
    return {name: Decoder(model, batch_size=options.batch_size) for name, model in found.items()}


def _report(options: argparse.Namespace, folder: Path, foreign: _Measured, saved: _Measured) -> Report:
    name = folder.name.rpartition("-")[0]
    return Report(
        "decode",
        options.device,
        settings={"model": folder.name, "steps": options.steps, "batch_size": options.batch_size},
        tables=[_table(f"One decode step of {name}", foreign), _table("The same, saved by save_model", saved)],
        limits=[
            Limit(f"all layers on warm disk over {PLACED}", foreign.samples.ratio(OURS, PLACED).median, "<=", LIMIT),
            Limit(
                f"saved by save_model, all layers on warm disk over {RESIDENT}",
                saved.samples.ratio(OURS, RESIDENT).median,
                "<=",
                LIMIT,
            ),
            Limit(
                "logits equal those of transformers' model to the bit",
                float(foreign.same_bits and saved.same_bits),
                "==",
                1,
                "count",
            ),
        ],
        notes=[
            "logits are compared with those of weights that view the same file: BLAS kernels depend on the alignment "
            "of weights, so a copy at another address may differ in the last bit",
            "warm: evicted from the page cache, read once, then measured",
        ],
        samples={"step": foreign.samples, "saved by save_model": saved.samples},
    )


def _table(title: str, measured: _Measured) -> Table:
    rate = Column("weights read at", "rate")
    return comparison_table(
        f"{title}, {measured.weights:,} bytes of weights",
        measured.samples,
        RESIDENT,
        extra=[(rate, lambda name: measured.weights / measured.samples.median(name))],
    )
