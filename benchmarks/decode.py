"""How fast does a model decode with all its layers on disk, the page cache warm, beside the same model in memory?

With the CPU as execution device, weights that show the mapped checkpoint should cost what weights in memory cost.
"Resident" means anonymous memory here: what transformers loads to the CPU shows the file itself, and is measured too.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .harness import Column, Limit, Report, Samples, Variant, comparison_table, measure

if TYPE_CHECKING:
    import torch

    from .steps import Decoder

OURS = "bigmodel, layers on disk"
RESIDENT = "resident, anonymous memory"
MAPPED = "transformers, mapped weights"
ACCELERATE = "accelerate, layers on disk"
INDEXED = "accelerate, layers in the shards"
LIMIT = 1.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this question can be asked with."""
    parser.add_argument("model", nargs="?", default=None, help="llama-1b, llama-40, or a folder (default: llama-1b)")
    parser.add_argument("--steps", type=int, default=4, help="decode steps behind each value")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences at once")
    parser.add_argument("--no-peers", action="store_true", help="leave accelerate out")


def run(options: argparse.Namespace) -> Report:
    """Measure step times, check that the logits agree to the bit, and hold ours against the resident model's."""
    from .checkpoints import checkpoint
    from .harness.pagecache import evict, warm

    folder = checkpoint(options.model or ("tiny" if options.quick else "llama-1b"), options.workdir)
    shards = sorted(folder.glob("*.safetensors"))
    # A file that was just written lies in the page cache in small pieces; read back, in large ones, as after any load.
    evict(shards)
    with tempfile.TemporaryDirectory(dir=options.workdir) as scratch:
        warm(shards)
        decoders = _decoders(folder, options, Path(scratch))
        logits = {name: decoder.logits(2) for name, decoder in decoders.items()}
        variants = [Variant(name, partial(each.seconds_per_step, options.steps)) for name, each in decoders.items()]
        samples = measure(variants, options.rounds, seed=options.seed)
        weights = sum(p.nbytes for p in decoders[RESIDENT].model.parameters())
    return _report(options, folder, samples, weights, logits)


def _decoders(folder: Path, options: argparse.Namespace, scratch: Path) -> dict[str, Decoder]:
    from . import models
    from .steps import Decoder

    device_map = models.layer_map(folder, layers="disk", rest="cpu")
    found = {
        RESIDENT: models.resident(folder),
        OURS: models.ours(folder, device_map),
        MAPPED: models.mapped(folder),
    }
    if not options.no_peers:
        found[ACCELERATE] = models.accelerate_dispatched(folder, device_map, scratch / "dat")
        found[INDEXED] = models.accelerate_indexed(folder, device_map, scratch / "shards")
    return {name: Decoder(model, batch_size=options.batch_size) for name, model in found.items()}


def _report(
    options: argparse.Namespace, folder: Path, samples: Samples, weights: int, logits: dict[str, torch.Tensor]
) -> Report:
    import torch

    rate = Column("weights read at", "rate")
    table = comparison_table(
        f"One decode step of {folder.name.rpartition('-')[0]}, {weights:,} bytes of weights",
        samples,
        RESIDENT,
        extra=[(rate, lambda name: weights / samples.median(name))],
    )
    same = torch.equal(logits[OURS], logits[MAPPED])
    return Report(
        "decode",
        options.device,
        settings={"model": folder.name, "steps": options.steps, "batch_size": options.batch_size},
        tables=[table],
        limits=[
            Limit("step with all layers on warm disk over resident", samples.ratio(OURS, RESIDENT).median, "<=", LIMIT),
            Limit("logits equal those of transformers' model to the bit", float(same), "==", 1, "count"),
        ],
        notes=[
            "equal bits are held against weights that show the same file: BLAS kernels choose their way by how weights "
            "are aligned in memory, so a copy at another address may differ in the last bit",
            "warm means: thrown out of the page cache, read once, then measured",
        ],
        samples={"step": samples},
    )
