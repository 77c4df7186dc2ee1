"""How fast does a model with its layers on disk run when nothing of it is in memory, beside the best raw reader?

Before every run the shards are evicted from the page cache, which `mincore` must confirm. "Raw" is the best of four
readers that only read the same files in the same rounds. Weights outside the layers (embeddings, head) are copied to
anonymous memory in every variant, so that all read the same bytes. Reading and computing share the processor: a raw
reader beside a model that computes in memory, independently, shows the cost of that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .harness import Column, Limit, Report, Samples, Variant, comparison_table, elapsed, measure
from .harness.pagecache import evict
from .harness.rawread import POPULATE, READERS, read_beside

if TYPE_CHECKING:
    from torch import nn

OURS = "bigmodel, just loaded"
AGAIN = "bigmodel, pages taken away"
MAPPED = "transformers, mapped weights"
BESIDE = "raw reader beside a model in memory"
ACCELERATE = "accelerate, .dat files"
INDEXED = "accelerate, shards"
RATE = "bytes per second"
LIMIT = 0.95

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it reads mapped weights from disk to compute on the host; `pipeline` measures disk to accelerator"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", nargs="?", default=None, help="llama-1b, or a folder (default: llama-1b)")
    parser.add_argument("--no-peers", action="store_true", help="leave accelerate out")


@dataclass
class Cold:
    """One variant of running a model, loaded once or before each run.

    Attributes:
        load: Loads the model.
        files: The files of its layers.
        layer_bytes: Bytes of its layers.
        anew: Load it again before each run: an existing map may keep pages in the page cache.
        model: The model of the last load.
    """

    load: Callable[[], nn.Module]
    files: list[Path]
    layer_bytes: int
    anew: bool = True
    model: nn.Module | None = field(default=None, init=False)

    def prepare(self) -> None:
        """Load the model if necessary, and evict its files from the page cache."""
        if self.model is None or self.anew:
            self.model = None
            self.model = self.load()
            own_memory(self.model)
        evict(self.files)

    def run(self) -> dict[str, float]:
        """Run one token through the model; return seconds and bytes of layers per second."""
        model = self.model
        assert model is not None
        seconds = elapsed(partial(one_token, model))
        if self.anew:
            self.model = None
        return {"seconds": seconds, RATE: self.layer_bytes / seconds}


def run(options: argparse.Namespace) -> Report:
    """Measure raw readers and models in the same rounds, everything cold before each."""
    from . import models
    from .checkpoints import checkpoint

    folder = checkpoint(options.model or ("tiny" if options.quick else "llama-1b"), options.workdir)
    shards = sorted(folder.glob("*.safetensors"))
    nbytes = sum(tensor.nbytes for tensor in layer_tensors(models.skeleton(folder)))
    with tempfile.TemporaryDirectory(dir=options.workdir) as scratch:
        ways = _ways(folder, shards, nbytes, Path(scratch), peers=not options.no_peers)
        variants = [Variant(name, partial(_read, name, shards), partial(evict, shards)) for name in READERS]
        reading = partial(_read_beside, models.resident(folder), shards)
        variants.append(Variant(BESIDE, reading, partial(evict, shards)))
        variants += [Variant(name, way.run, way.prepare) for name, way in ways.items()]
        samples = measure(variants, options.rounds, seed=options.seed)
    return _report(options, folder, samples, nbytes)


def one_token(model: nn.Module) -> None:
    """Run one token through a model."""
    import torch

    with torch.inference_mode():
        model(input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=False)


def own_memory(model: nn.Module) -> None:
    """Copy weights outside the layers to anonymous memory, so that they do not map the shards."""
    layers = {id(tensor) for tensor in layer_tensors(model)}
    for parameter in model.parameters():
        if id(parameter) not in layers and not parameter.is_meta:
            parameter.data = parameter.data.clone()


def layer_tensors(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the layers."""
    return [parameter for name, parameter in model.named_parameters() if ".layers." in name]


def _ways(folder: Path, shards: list[Path], nbytes: int, scratch: Path, peers: bool) -> dict[str, Cold]:
    from . import models

    device_map = models.layer_map(folder, layers="disk", rest="cpu")
    ours = partial(models.ours, folder, device_map)
    ways = {
        OURS: Cold(ours, shards, nbytes),
        AGAIN: Cold(ours, shards, nbytes, anew=False),
        MAPPED: Cold(partial(models.mapped, folder), shards, nbytes),
    }
    if peers:
        dat = models.accelerate_dispatched(folder, device_map, scratch / "dat")
        files = sorted((scratch / "dat").glob("*.dat"))
        ways[ACCELERATE] = Cold(lambda: dat, files, nbytes, anew=False)
        indexed = partial(models.accelerate_indexed, folder, device_map, scratch / "shards")
        ways[INDEXED] = Cold(indexed, shards, nbytes, anew=False)
    return ways


def _read(name: str, files: list[Path]) -> dict[str, float]:
    nbytes = sum(file.stat().st_size for file in files)
    seconds = elapsed(lambda: READERS[name](files))
    return {"seconds": seconds, RATE: nbytes / seconds}


def _read_beside(model: nn.Module, files: list[Path]) -> dict[str, float]:
    nbytes = sum(file.stat().st_size for file in files)
    seconds = elapsed(lambda: read_beside(partial(one_token, model), POPULATE, files))
    return {"seconds": seconds, RATE: nbytes / seconds}


def best_raw(samples: Samples) -> str:
    """Return the name of the raw reader with the highest median rate."""
    return max(READERS, key=lambda name: samples.median(name, RATE))


def _report(options: argparse.Namespace, folder: Path, samples: Samples, nbytes: int) -> Report:
    best = best_raw(samples)
    title = f"A cold forward of {folder.name.rpartition('-')[0]}: {nbytes:,} bytes of layers"
    seconds = Column("seconds", "seconds")
    table = comparison_table(title, samples, best, RATE, "rate", extra=[(seconds, samples.median)])
    over = samples.ratio(OURS, best, RATE).median
    return Report(
        "cold",
        options.device,
        settings={"model": folder.name},
        tables=[table],
        limits=[Limit(f"cold forward over the best raw reader ({best})", over, ">=", LIMIT)],
        samples={"cold": samples},
    )
