"""How fast is saving of a training state, and how much memory does it take?

A model with Adam's moments is saved by bigmodel and by accelerate; for comparison the same bytes are written raw. Every
variant ends with fsync: bigmodel calls it itself, for accelerate it is added.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .harness import Column, Limit, Report, Table, Variant, comparison_table, elapsed, measure

RAW, BIGMODEL, ACCELERATE = "raw write", "bigmodel", "accelerate, then fsync"
SPEED = 0.8
SHARD = 10**9

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it measures the disk and host memory, through which all states are saved"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--megabytes", type=int, default=1200, help="size of the state: a third each for weights and two moments"
    )
    parser.set_defaults(rounds=5)


def run(options: argparse.Namespace) -> Report:
    """Measure the time and memory of saving and of raw writing."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    nbytes = (6 if options.quick else options.megabytes) * 10**6
    with tempfile.TemporaryDirectory(dir=options.workdir) as scratch:
        folder = Path(scratch) / "state"
        folder.mkdir()
        savers = {
            RAW: _raw(nbytes, folder),
            BIGMODEL: _bigmodel(nbytes, folder),
            ACCELERATE: _accelerate(nbytes, folder),
        }
        variants = [Variant(name, partial(_measured, save), partial(_emptied, folder)) for name, save in savers.items()]
        samples = measure(variants, options.rounds, seed=options.seed)
    columns = [
        Column("variant"),
        Column("seconds", "seconds"),
        Column("speed", "rate"),
        Column("peak memory added", "bytes"),
    ]
    rows = [
        [name, samples.median(name), nbytes / samples.median(name), int(max(samples.of(name, "memory")))]
        for name in savers
    ]
    limits = [
        Limit("speed of bigmodel against a raw write", samples.median(RAW) / samples.median(BIGMODEL), ">=", SPEED),
        Limit("memory bigmodel adds", max(samples.of(BIGMODEL, "memory")), "<=", SHARD, "bytes"),
    ]
    tables = [Table(f"A state of {nbytes:,} bytes", columns, rows), comparison_table("Saving", samples, RAW)]
    return Report("save_state", options.device, {"nbytes": nbytes}, tables, limits, samples={"save": samples})


def _measured(save: Callable[[], None]) -> dict[str, float]:
    from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory

    reset_peak_memory("cpu")
    before = memory_allocated("cpu")
    seconds = elapsed(save, "cpu")
    return {"seconds": seconds, "memory": max(max_memory_allocated("cpu") - before, 0)}


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    os.sync()


def _raw(nbytes: int, folder: Path) -> Callable[[], None]:
    chunk = memoryview(os.urandom(8 * 2**20))

    def write() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            left = nbytes
            while left > 0:
                left -= file.write(chunk[: min(left, len(chunk))])
            os.fsync(file.fileno())

    return write


def _bigmodel(nbytes: int, folder: Path) -> Callable[[], None]:
    from bigmodel.train import Accelerator

    accelerator = Accelerator()
    _trained(accelerator, nbytes)

    def save() -> None:
        accelerator.save_state(folder / "bigmodel")

    return save


def _accelerate(nbytes: int, folder: Path) -> Callable[[], None]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    _trained(accelerator, nbytes)

    def save() -> None:
        accelerator.save_state(str(folder / "accelerate"))
        for path in (folder / "accelerate").iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    return save


def _trained(accelerator: Any, nbytes: int) -> None:
    """Prepare a model with Adam whose weights and moments take `nbytes`, and make one step."""
    import torch

    width = 1024 if nbytes > 10**8 else 64
    layers = max(nbytes // (3 * 4 * width * width), 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
