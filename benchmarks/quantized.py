"""How much faster is a streamed step over a slow link when the weights cross it as int8 or int4?

All blocks are stored in host memory and streamed to an accelerator. The lower bound of a step is the link's time for
the bytes that it moves: a quarter or an eighth of those of float32, plus a scale per group. The cost is reported too:
the errors of the weights and of the model's outputs. In the same rounds float32 blocks of the size of int4 ones are
streamed: the excess of their step over the transfer is overhead of the machine, not of restoring.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, elapsed, measure
from .harness.devices import first_device
from .harness.report import Cell
from .links import add_link, link_rates, pinned_rate

if TYPE_CHECKING:
    import torch
    from torch import nn

LIMIT = 1.1
LINKS = (0.2e9, 0.5e9, 2e9)
"""Beside the first, this processor restores int4 in less than the transfer; a virtual accelerator restores there."""

KINDS = (None, "int8", "int4")
EXACT = "float32"
SMALL = "float32, small"

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_link(parser)
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure steps with exact and quantised weights in the same rounds, for each bandwidth of the link."""
    import torch

    torch.set_num_threads(options.threads or 1)
    count, width = (4, 256) if options.quick else (24, 2048)
    device = first_device(options.device)
    rows: list[list[Cell]] = []
    kept: dict[str, Samples] = {}
    for rate in link_rates(options, LINKS):
        found, samples = _rows(options, count, width, device, rate)
        rows += found
        kept["link" if rate is None else f"link {rate:g}"] = samples
    columns = [Column("link", "rate"), Column("weights"), Column("bytes moved", "bytes"), Column("step", "seconds")]
    columns += [Column("exact over this", "ratio"), Column("step over its transfer", "ratio")]
    columns += [Column("weights' error", "ratio"), Column("outputs' error", "ratio")]
    slowest = [row for row in rows if row[0] == rows[0][0] and row[1] in KINDS]
    worst = max(float(row[5] or 0) for row in slowest)
    return Report(
        "quantized",
        options.device,
        settings={"blocks": count, "width": width, "threads": torch.get_num_threads()},
        tables=[Table(f"{count} blocks of {4 * width**2:,} bytes in host memory", columns, rows)],
        limits=[Limit("worst quantised step over its transfer, on the slowest link", worst, "<=", LIMIT)],
        samples=kept,
    )


def _rows(
    options: argparse.Namespace, count: int, width: int, device: str, rate: float | None
) -> tuple[list[list[Cell]], Samples]:
    """Return the rows of one link bandwidth, and their samples."""
    import torch

    from bigmodel.devices import virtual

    from .blocks import make_blocks

    if rate is not None:
        virtual.enable(count=1, bandwidth=rate)
    widths = {kind or EXACT: width for kind in KINDS} | {SMALL: small_width(width)}
    models = {name: _model(count, wide, device, name) for name, wide in widths.items()}
    inputs = {name: torch.linspace(-1, 1, wide).reshape(1, wide) for name, wide in widths.items()}
    with torch.inference_mode():
        expected = {name: make_blocks(count, wide)(inputs[name]) for name, wide in widths.items()}
    samples = measure(
        [Variant(name, partial(_step, model, inputs[name].to(device), device)) for name, model in models.items()],
        options.rounds,
        seed=options.seed,
    )
    link = rate or pinned_rate(4 * width**2, device)
    rows = [_row(name, model, samples, link, inputs[name].to(device), expected[name]) for name, model in models.items()]
    del models
    if rate is not None:
        virtual.disable()
    return rows, samples


def _row(name: str, model: Any, samples: Samples, link: float, x: torch.Tensor, expected: torch.Tensor) -> list[Cell]:
    import torch

    from bigmodel.dispatch import quantization_errors

    counters = next(iter(model.dispatch_stats().values()))
    nbytes = round(counters["bytes_from_ram"] / counters["fetches"] * len(model.blocks))
    errors = [error.relative for error in quantization_errors(model).values()]
    with torch.inference_mode():
        output = model(x).cpu()
    step = samples.median(name)
    return [
        link,
        name,
        nbytes,
        step,
        samples.median(EXACT) / step,
        step * link / nbytes,
        sum(errors) / len(errors) if errors else 0.0,
        float((output - expected).norm() / expected.norm()),
    ]


def small_width(width: int) -> int:
    """Return the width of a float32 block with the bytes of an int4 block of width `width`."""
    from bigmodel.profile.model.quantized import quantized_bytes

    return math.isqrt(quantized_bytes((width, width), "float32", "int4") // 4)


def _model(count: int, width: int, device: str, name: str) -> nn.Module:
    from bigmodel.dispatch import dispatch_model

    from .blocks import block_map, make_blocks

    device_map = block_map(count, range(count), "cpu", "cpu")
    return dispatch_model(
        make_blocks(count, width), device_map, main_device=device, offload_dtype=name if name in KINDS else None
    )


def _step(model: Any, x: torch.Tensor, device: str) -> float:
    """Return the mean seconds of two forwards after an unmeasured one, as in generation."""
    import torch

    with torch.inference_mode():
        model(x)
        return elapsed(lambda: [model(x) for _ in range(2)], device) / 2
