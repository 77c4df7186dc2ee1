"""How much time does streaming take per block beyond the copy, and what does dispatching cost resident blocks?

The blocks are so small that their compute and copies take little time; what remains is the mechanism, in microseconds
per block, on an accelerator (weights in host memory) and on the host (weights on disk, warm page cache).
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, comparison_table, elapsed, measure
from .harness.devices import first_device
from .harness.report import Cell

if TYPE_CHECKING:
    from torch import nn

PLAIN, STREAMED, HALF = "plain", "streamed", "every other block streamed"
COPIES, ACCELERATE = "copies alone", "accelerate"
LIMIT = 30e-6

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--blocks", type=int, default=40, help="how many blocks")
    parser.add_argument("--width", type=int, default=64, help="how wide they are")
    parser.add_argument("--forwards", type=int, default=50, help="forwards behind each value")
    parser.set_defaults(device="virtual", rounds=15)


def run(options: argparse.Namespace) -> Report:
    """Measure forwards with and without streaming, and their difference per block."""
    import torch

    torch.set_num_threads(options.threads or 1)
    device = first_device(options.device)
    forwards = 2 if options.quick else options.forwards
    found = []
    with tempfile.TemporaryDirectory() as folder:
        found.append(on_host(options, Path(folder), forwards))
        if device != "cpu":
            found.append(on_accelerator(options, device, forwards))
    rows: list[list[Cell]] = [
        [where, samples.median(PLAIN), samples.median(STREAMED), each] for where, samples, each, _ in found
    ]
    columns = [Column("weights"), *(Column(name, "seconds") for name in (PLAIN, STREAMED, "overhead per block"))]
    limits = [Limit(f"overhead per block, {where}", each, "<=", LIMIT, "seconds") for where, _, each, _ in found]
    limits += [
        Limit(f"resident blocks with something left on them, {where}", left, "==", 0, "count")
        for where, _, _, left in found
    ]
    tables = [comparison_table(f"A forward, {where}", samples, PLAIN) for where, samples, _, _ in found]
    settings = {"blocks": options.blocks, "width": options.width, "forwards": forwards}
    summary = Table(f"{options.blocks} blocks of {4 * options.width**2:,} bytes", columns, rows)
    kept = {where: samples for where, samples, _, _ in found}
    return Report("overhead", options.device, settings, [summary, *tables], limits, samples=kept)


def on_host(options: argparse.Namespace, folder: Path, forwards: int) -> tuple[str, Samples, float, int]:
    """Return name, samples, seconds per block, and attributes on resident blocks: on the host, weights on disk."""
    from bigmodel.dispatch import load_checkpoint_and_dispatch

    from .blocks import Blocks, block_map, make_blocks, save_blocks, spread

    count, width = options.blocks, options.width
    file = save_blocks(make_blocks(count, width), folder)
    plain = make_blocks(count, width)

    def loaded(streamed: range | list[int]) -> nn.Module:
        device_map = block_map(count, list(streamed), "disk", "cpu")
        return load_checkpoint_and_dispatch(Blocks(count, width).eval(), file, device_map=device_map)

    half = loaded(spread(count, count // 2))
    found = {PLAIN: plain, STREAMED: loaded(range(count)), HALF: half, ACCELERATE: _accelerate_on_host(file, options)}
    samples = _measured(found, {}, options, "cpu", forwards)
    each = (samples.median(STREAMED) - samples.median(PLAIN)) / count
    return "host, on disk", samples, each, _left_on_residents(half, spread(count, count // 2))


def on_accelerator(options: argparse.Namespace, device: str, forwards: int) -> tuple[str, Samples, float, int]:
    """Return the same on an accelerator, weights in host memory; the time of the copies alone is subtracted."""
    from bigmodel.devices import virtual
    from bigmodel.dispatch import dispatch_model

    from .blocks import block_map, make_blocks, spread

    count, width = options.blocks, options.width
    if device.startswith("virtual"):
        virtual.enable(count=1)
    plain = make_blocks(count, width).to(device)

    def dispatched(streamed: range | list[int]) -> nn.Module:
        device_map = block_map(count, list(streamed), "cpu", device)
        return dispatch_model(make_blocks(count, width), device_map, main_device=device)

    half = dispatched(spread(count, count // 2))
    found = {PLAIN: plain, STREAMED: dispatched(range(count)), HALF: half}
    samples = _measured(found, {COPIES: _copies(count, width, device)}, options, device, forwards)
    beyond = samples.median(STREAMED) - samples.median(PLAIN) - samples.median(COPIES)
    left = _left_on_residents(half, spread(count, count // 2))
    return f"{device}, in host memory", samples, beyond / count, left


def _accelerate_on_host(file: Path, options: argparse.Namespace) -> nn.Module:
    from accelerate import load_checkpoint_and_dispatch

    from . import models
    from .blocks import Blocks, block_map

    models.quiet()
    device_map = block_map(options.blocks, range(1, options.blocks), "disk", "cpu")
    model: nn.Module = load_checkpoint_and_dispatch(
        Blocks(options.blocks, options.width).eval(),
        str(file),
        device_map=device_map,
        offload_folder=file.parent / "dat",
    )
    return model


def _copies(count: int, width: int, device: str) -> Any:
    """Return a function that only copies the bytes of a forward that streams every block to `device`."""
    import torch

    pin = device.startswith("cuda")
    sources = [torch.zeros(4 * width**2, dtype=torch.uint8, pin_memory=pin) for _ in range(count)]
    targets = [torch.empty(4 * width**2, dtype=torch.uint8, device=device) for _ in range(2)]

    def copy(_: Any) -> None:
        for number, source in enumerate(sources):
            targets[number % 2].copy_(source, non_blocking=True)

    return copy


def _measured(
    found: dict[str, nn.Module], others: dict[str, Any], options: argparse.Namespace, device: str, forwards: int
) -> Samples:
    import torch

    x = torch.linspace(-1, 1, options.width).reshape(1, options.width).to(device)

    def seconds(call: Any) -> float:
        with torch.inference_mode():
            call(x)
            return elapsed(lambda: [call(x) for _ in range(forwards)], device) / forwards

    variants = [Variant(name, partial(seconds, call)) for name, call in {**found, **others}.items()]
    return measure(variants, options.rounds, seed=options.seed)


def _left_on_residents(model: nn.Module, streamed: list[int]) -> int:
    from .resident import hooked_modules

    blocks: Any = model.get_submodule("blocks")
    return sum(hooked_modules(block) for index, block in enumerate(blocks) if index not in set(streamed))
