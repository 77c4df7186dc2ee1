"""How long does it take to load a checkpoint and run it once: to a device, and with all layers left on disk?

With ``--device cpu`` both are measured, else loading whole to the accelerator. Every load runs in a separate process
that has imported its libraries before, since much of a load's time is first accesses to new memory. A first forward is
included, since a load that only maps files has read nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .harness import Column, Limit, Report, Samples, Table, Variant, comparison_table, measure, run_isolated
from .harness.clock import synchronize
from .harness.devices import first_device, is_virtual
from .harness.report import Cell

if TYPE_CHECKING:
    from torch import nn

CPU = "cpu"
ACCELERATOR = "accelerator"
DISK = "layers on disk"
OURS, TRANSFORMERS, ACCELERATE = "bigmodel", "transformers", "accelerate"
FASTER_THAN_ACCELERATE = 10

DEVICES = ("cpu", "cuda", "virtual")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", nargs="?", default=None, help="llama-1b, or a folder (default: llama-1b)")


def run(options: argparse.Namespace) -> Report:
    """Measure every loader with a warm page cache, and compare bigmodel with the peers."""
    from . import models
    from .checkpoints import checkpoint
    from .harness.pagecache import evict, warm

    folder = checkpoint(options.model or ("tiny" if options.quick else "llama-1b"), options.workdir)
    shards = sorted(folder.glob("*.safetensors"))
    evict(shards)
    maps = {CPU: models.layer_map(folder, "cpu", "cpu"), DISK: models.layer_map(folder, "disk", "cpu")}
    loads = [(OURS, CPU), (TRANSFORMERS, CPU), (ACCELERATE, CPU), (OURS, DISK), (ACCELERATE, DISK)]
    if options.device != CPU:
        maps = {ACCELERATOR: {"": first_device(options.device)}}
        loads = [(OURS, ACCELERATOR), (TRANSFORMERS, ACCELERATOR)]
        if not is_virtual(options.device):  # accelerate reads with safetensors, which has no such device
            loads.append((ACCELERATE, ACCELERATOR))
    with tempfile.TemporaryDirectory(dir=options.workdir) as scratch:
        variants = [
            Variant(
                f"{how}, {where}",
                partial(_load, how=how, folder=folder, device_map=maps[where], scratch=Path(scratch)),
                partial(warm, shards),
            )
            for how, where in loads
        ]
        samples = measure(variants, options.rounds, warmup=0, seed=options.seed)
    return _report(options, folder, samples)


def _load(how: str, folder: Path, device_map: dict[str, int | str], scratch: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=scratch) as offload:
        found: dict[str, float] = run_isolated(
            load_and_answer, how=how, folder=str(folder), device_map=device_map, offload=offload
        )
    return found


def load_and_answer(how: str, folder: str, device_map: dict[str, int | str], offload: str) -> dict[str, float]:
    """Load a checkpoint and run it once; return the seconds of both, together and apart. Called in a fresh process."""
    import torch

    from bigmodel.devices import virtual

    from . import models
    from .steps import Decoder

    device = str(device_map.get("", CPU))
    if is_virtual(device):
        virtual.enable(count=1)
    torch.empty(1, device=device)  # the device's context takes seconds
    models.warm_up(accelerate=how == ACCELERATE)
    ways: dict[str, Callable[[], nn.Module]] = {
        OURS: lambda: models.ours(Path(folder), device_map),
        TRANSFORMERS: lambda: models.mapped(Path(folder)).to(device),
        ACCELERATE: lambda: models.accelerate_dispatched(Path(folder), device_map, Path(offload)),
    }
    begun = time.perf_counter()
    model = ways[how]()
    synchronize(device)
    loaded = time.perf_counter()
    Decoder(model, device).start()
    synchronize(device)
    answered = time.perf_counter()
    return {"seconds": answered - begun, "load": loaded - begun, "first forward": answered - loaded}


def _report(options: argparse.Namespace, folder: Path, samples: Samples) -> Report:
    if options.device != CPU:
        return _report_of_accelerator(options, folder, samples)
    to_cpu = _only(samples, CPU)
    to_disk = _only(samples, DISK)
    title = folder.name.rpartition("-")[0]
    tables = [
        comparison_table(f"Load {title} to the CPU and answer", to_cpu, f"{TRANSFORMERS}, {CPU}"),
        comparison_table(f"Load {title} with all layers on disk", to_disk, f"{ACCELERATE}, {DISK}", "load"),
        _parts(samples),
    ]
    faster = 1 / samples.ratio(f"{OURS}, {DISK}", f"{ACCELERATE}, {DISK}", "load").median
    over = samples.ratio(f"{OURS}, {CPU}", f"{TRANSFORMERS}, {CPU}").median
    return Report(
        "load",
        options.device,
        settings={"model": folder.name},
        tables=tables,
        limits=[
            Limit("load to the CPU and first forward, over transformers", over, "<=", 1.0),
            Limit("load with layers on disk, times faster than accelerate", faster, ">=", FASTER_THAN_ACCELERATE),
        ],
        samples={"load": samples},
    )


def _report_of_accelerator(options: argparse.Namespace, folder: Path, samples: Samples) -> Report:
    ours, theirs = f"{OURS}, {ACCELERATOR}", f"{TRANSFORMERS}, {ACCELERATOR}"
    nbytes = sum(shard.stat().st_size for shard in folder.glob("*.safetensors"))
    rate = (Column("rate", "rate"), lambda name: nbytes / samples.median(name, "load"))
    title = f"Load {folder.name.rpartition('-')[0]} to {options.device}, {nbytes:,} bytes"
    over = samples.ratio(ours, theirs, "load").median
    return Report(
        "load",
        options.device,
        settings={"model": folder.name},
        tables=[comparison_table(title, samples, theirs, "load", extra=[rate]), _parts(samples)],
        limits=[Limit("load to the accelerator over transformers and .to()", over, "<=", 1.0)],
        samples={"load": samples},
    )


def _only(samples: Samples, where: str) -> Samples:
    return Samples({name: figures for name, figures in samples.values.items() if name.endswith(where)})


def _parts(samples: Samples) -> Table:
    rows: list[list[Cell]] = [
        [name, samples.median(name, "load"), samples.median(name, "first forward"), samples.median(name)]
        for name in samples.values
    ]
    heads = [Column("variant"), *(Column(name, "seconds") for name in ("load", "first forward", "together"))]
    return Table("Medians, apart and together", heads, rows)
