"""Can threads share one dispatched model? Every output of many concurrent forwards is compared with the plain model's.

Each thread has its own inputs and timing, so blocks are fetched, awaited, shared and evicted in random order. Outputs
must be bitwise equal. A model is run until every thread has made its forwards or ``--seconds`` have passed.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Table, elapsed
from .harness.devices import first_device
from .harness.report import Cell

if TYPE_CHECKING:
    import torch
    from torch import nn

WIDTH, BLOCKS = 64, 12

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--callers", type=int, default=8, help="threads that call the model")
    parser.add_argument("--forwards", type=int, default=1000, help="forwards of each, at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each model, at most")
    parser.add_argument("--no-peers", action="store_true", help="leave accelerate out")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Run the forwards on each offloaded model and count wrong outputs."""
    import torch

    torch.set_num_threads(options.threads or 1)
    forwards, limit = (8, math.inf) if options.quick else (options.forwards, options.seconds)
    device = first_device(options.device)
    rows: list[list[Cell]] = []
    limits: list[Limit] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, plain, place) in _offloaded(Path(folder), device, not options.no_peers).items():
            counts: dict[str, int] = {"right": 0, "wrong": 0, "raised": 0}
            work = repeated_forwards(model, plain, place, options.callers, forwards, counts, limit)
            seconds = elapsed(work, place)
            rows.append([name, counts["right"], counts["wrong"], counts["raised"], seconds])
            if name.startswith("bigmodel"):
                failed = counts["wrong"] + counts["raised"]
                limits.append(Limit(f"{name}: forwards that were not right", failed, "==", 0, "count"))
    columns = [Column("model"), *(Column(name, "count") for name in ("right", "wrong", "raised"))]
    title = f"{options.callers} threads, at most {forwards} forwards each, {BLOCKS} blocks"
    settings = {"callers": options.callers, "forwards": forwards, "seconds": options.seconds}
    settings |= {"blocks": BLOCKS, "width": WIDTH}
    table = Table(title, [*columns, Column("took", "seconds")], rows)
    return Report("threads", options.device, settings, [table], limits)


def _offloaded(folder: Path, device: str, peers: bool) -> dict[str, tuple[nn.Module, nn.Module, str]]:
    """Return offloaded models by name, each with the plain one and the device of its inputs."""
    from bigmodel.devices import virtual
    from bigmodel.dispatch import dispatch_model, load_checkpoint_and_dispatch

    from .blocks import Blocks, block_map, make_blocks, save_blocks, spread

    half = spread(BLOCKS, BLOCKS // 2)
    file = save_blocks(make_blocks(BLOCKS, WIDTH), folder)
    plain = make_blocks(BLOCKS, WIDTH)
    found: dict[str, tuple[nn.Module, nn.Module, str]] = {}
    on_disk = load_checkpoint_and_dispatch(Blocks(BLOCKS, WIDTH).eval(), file, device_map={"": "disk"})
    found["bigmodel, host, on disk"] = (on_disk, plain, "cpu")
    if device != "cpu":
        if device.startswith("virtual"):
            virtual.enable(count=1)
        there = make_blocks(BLOCKS, WIDTH).to(device)
        streamed = dispatch_model(make_blocks(BLOCKS, WIDTH), block_map(BLOCKS, half, "cpu", device))
        whole = dispatch_model(make_blocks(BLOCKS, WIDTH), {"": "cpu"}, main_device=device)
        disk_map = block_map(BLOCKS, half, "disk", device)
        piped = load_checkpoint_and_dispatch(Blocks(BLOCKS, WIDTH).eval(), file, device_map=disk_map)
        found[f"bigmodel, {device}, half streamed"] = (streamed, there, device)
        found[f"bigmodel, {device}, all streamed"] = (whole, there, device)
        found[f"bigmodel, {device}, half on disk"] = (piped, there, device)
    if peers:
        from accelerate import cpu_offload

        found["accelerate, cpu_offload"] = (cpu_offload(make_blocks(BLOCKS, WIDTH), "cpu"), plain, "cpu")
    return found


def repeated_forwards(
    model: Any,
    plain: Any,
    place: str,
    callers: int,
    forwards: int,
    counts: dict[str, int],
    limit: float = math.inf,
) -> Callable[[], None]:
    """Return a function that runs forwards in `callers` threads for `limit` seconds and counts their outcomes."""
    import torch

    with torch.inference_mode():
        inputs = [torch.linspace(-1, seed + 1, WIDTH).reshape(1, WIDTH).to(place) for seed in range(callers * 4)]
        wanted = [plain(x) for x in inputs]
    lock = threading.Lock()

    def call(number: int, end: float) -> None:
        for turn in range(forwards):
            if time.monotonic() >= end:
                break
            index = 4 * number + turn % 4
            ended = _ended(model, inputs[index], wanted[index])
            with lock:
                counts[ended] += 1

    def work() -> None:
        end = time.monotonic() + limit
        threads = [
            threading.Thread(target=call, args=(number, end), name=f"caller {number}") for number in range(callers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return work


def _ended(model: Any, x: torch.Tensor, wanted: torch.Tensor) -> str:
    import torch

    try:
        with torch.inference_mode():
            return "right" if torch.equal(model(x), wanted) else "wrong"
    except Exception:  # a peer that raises is counted, and the measurement goes on
        return "raised"
