"""Does streaming hide behind compute, and compute behind streaming, over a grid of their ratios?

Streamed blocks alternate with resident ones, so the lower bound of a step is max(compute, transfer). Compute is
measured on the same model with all blocks resident, right before or after each step; all ratios take turns in each
round, since a machine's speed drifts by more than what is looked for. Transfer is the link's time for the bytes: on a
virtual accelerator the bandwidth is set; on a real one it is measured, and the number of rows sets the ratio.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, elapsed, measure
from .harness.report import Cell
from .links import pinned_rate

if TYPE_CHECKING:
    import torch
    from torch import nn

LIMIT = 1.05
RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
STREAMED = (0.5, 0.25)


@dataclass(frozen=True)
class Grid:
    """Sizes of the model and the grid: blocks, their width, rows of the input, shares streamed, ratios."""

    blocks: int
    width: int
    rows: int
    steps: int
    streamed: tuple[float, ...]
    ratios: tuple[float, ...]


DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=int, default=3, help="steps behind each value")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure steps over the grid and compare each with the larger of compute and transfer."""
    import torch

    # One thread computes and one copies: with more, the host's cores would be the bottleneck.
    torch.set_num_threads(options.threads or 1)
    grid = Grid(24, 1024, 128, options.steps, STREAMED, RATIOS)
    if options.quick:
        grid = Grid(6, 128, 32, 1, (0.5,), (0.5, 2.0))
    found = virtual_grid(grid, options) if options.device == "virtual" else accelerator_grid(grid, options)
    rows, samples = found
    columns = [Column("streamed blocks", "count"), Column("transfer : compute", "ratio")]
    columns += [Column(name, "seconds") for name in ("compute", "transfer", "step", "step q1", "step q3")]
    columns += [Column("step over max", "ratio"), Column("step over sum", "ratio")]
    worst = max(float(row[7] or 0) for row in rows)
    return Report(
        "overlap",
        options.device,
        settings={**vars(grid), "threads": torch.get_num_threads()},
        tables=[Table(f"{grid.blocks} blocks of {4 * grid.width**2:,} bytes, interleaved", columns, rows)],
        limits=[Limit("worst step of the grid over max(compute, transfer)", worst, "<=", LIMIT)],
        samples=samples,
    )


def virtual_grid(grid: Grid, options: argparse.Namespace) -> tuple[list[list[Cell]], dict[str, Samples]]:
    """Return the rows of the table, and their samples, on a virtual accelerator with a given link."""
    from bigmodel.devices import virtual

    rows: list[list[Cell]] = []
    kept: dict[str, Samples] = {}
    for share in grid.streamed:
        count = round(share * grid.blocks)
        virtual.enable(count=1)
        resident, streamed = models(grid, count, "virtual:0")
        x = inputs(grid, "virtual:0")
        nbytes = count * 4 * grid.width**2
        compute = min(_seconds(resident, x, grid.steps, "virtual:0") for _ in range(3))
        both = partial(_both, resident, streamed, x, grid.steps, "virtual:0", random.Random(options.seed))
        bandwidths = {f"{wanted}": nbytes / (wanted * compute) for wanted in grid.ratios}
        variants = [
            Variant(name, both, prepare=partial(virtual.configure, 0, bandwidth=bandwidth))
            for name, bandwidth in bandwidths.items()
        ]
        samples = measure(variants, options.rounds, seed=options.seed)
        for name, bandwidth in bandwidths.items():
            virtual.configure(0, bandwidth=bandwidth)
            rows.append(_row(count, samples, name, virtual.link(0).seconds(nbytes)))
        kept[f"{count} streamed"] = samples
        del resident, streamed, x, both, variants
        virtual.disable()
    return rows, kept


def accelerator_grid(grid: Grid, options: argparse.Namespace) -> tuple[list[list[Cell]], dict[str, Samples]]:
    """Return the same on a real accelerator, where the rows of the input set the ratio."""
    device = "cuda:0" if options.device == "cuda" else options.device
    rows: list[list[Cell]] = []
    kept: dict[str, Samples] = {}
    large = Grid(grid.blocks, 128 if options.quick else 4096, grid.rows, grid.steps, grid.streamed, grid.ratios)
    for share in grid.streamed:
        count = round(share * grid.blocks)
        resident, streamed = models(large, count, device)
        nbytes = count * 4 * large.width**2
        rate = pinned_rate(nbytes // count, device)
        draw = random.Random(options.seed)
        variants = []
        for wanted in grid.ratios:
            number = _rows_for(resident, large, nbytes / rate / wanted, device)
            x = inputs(Grid(large.blocks, large.width, number, 1, (), ()), device)
            variants.append(Variant(f"{wanted}", partial(_both, resident, streamed, x, large.steps, device, draw)))
        samples = measure(variants, options.rounds, seed=options.seed)
        rows += [_row(count, samples, variant.name, nbytes / rate) for variant in variants]
        kept[f"{count} streamed"] = samples
    return rows, kept


def models(grid: Grid, streamed: int, device: str) -> tuple[nn.Module, nn.Module]:
    """Return the model resident on `device`, and the same with `streamed` interleaved blocks in host memory."""
    from bigmodel.dispatch import dispatch_model

    from .blocks import block_map, make_blocks, spread

    resident = make_blocks(grid.blocks, grid.width).to(device)
    device_map = block_map(grid.blocks, spread(grid.blocks, streamed), "cpu", device)
    return resident, dispatch_model(make_blocks(grid.blocks, grid.width), device_map)


def inputs(grid: Grid, device: str) -> torch.Tensor:
    """Return an input for the model of `grid`."""
    import torch

    return torch.linspace(-1, 1, grid.rows * grid.width).reshape(grid.rows, grid.width).to(device)


def _rows_for(model: nn.Module, grid: Grid, seconds: float, device: str) -> int:
    """Return how many rows of input make a forward take about `seconds`."""
    probe = 4096
    x = inputs(Grid(grid.blocks, grid.width, probe, 1, (), ()), device)
    taken = min(_seconds(model, x, 1, device) for _ in range(3))
    return max(1, round(probe * seconds / taken))


def _both(
    resident: nn.Module, streamed: nn.Module, x: torch.Tensor, steps: int, device: str, draw: random.Random
) -> dict[str, float]:
    """Return the seconds of a step of both models, measured one right after the other in an order that is drawn: both
    have the machine as it is just then."""
    models = {"compute": resident, "step": streamed}
    order = draw.sample(list(models), 2)
    return {name: _seconds(models[name], x, steps, device) for name in order}


def _seconds(model: Any, x: torch.Tensor, steps: int, device: str) -> float:
    """Return the mean seconds of `steps` forwards after an unmeasured one, as in generation."""
    import torch

    with torch.inference_mode():
        model(x)
        return elapsed(lambda: [model(x) for _ in range(steps)], device) / steps


def _row(count: int, samples: Samples, cell: str, transfer: float) -> list[Cell]:
    """Return the table's row of one cell. A step is held against the compute of the same round: the median is of the
    ratios of all rounds."""
    compute, step = samples.median(cell, "compute"), samples.summary(cell, "step")
    pairs = list(zip(samples.of(cell, "compute"), samples.of(cell, "step"), strict=True))
    over_max = statistics.median(taken / max(alone, transfer) for alone, taken in pairs)
    over_sum = statistics.median(taken / (alone + transfer) for alone, taken in pairs)
    timed: list[Cell] = [compute, transfer, step.median, step.first_quartile, step.third_quartile]
    return [count, transfer / compute, *timed, over_max, over_sum]
