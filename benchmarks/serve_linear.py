"""Which library computes float32 products faster on this host, at the row counts of a step?

`server/engine/compute/host_linear.py` chooses one by the processor; this benchmark justifies the choice. All products
of one layer of a Llama are timed, over more layers than the CPU caches hold.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING

from .harness import Column, Limit, Report, Table, Variant, measure
from .serve_model import SIZES

if TYPE_CHECKING:
    import torch

    from bigmodel.server.engine.compute.host_linear import HostLinear, Linear

TORCH: HostLinear = "torch"
ONEDNN: HostLinear = "onednn"
ROWS = (2, 16, 128, 512)

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it justifies the choice between two libraries of the host"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 8x1024, 4x512, 2x64")


def run(options: argparse.Namespace) -> Report:
    """Measure the seconds of a layer's products with both; the engine's choice must not be the slower one."""
    import torch

    from bigmodel.server.engine.compute.host_linear import choose_host_linear, linear_of

    size = options.size or ("2x64" if options.quick else "8x1024")
    layers, flops = _layers(size)
    taken = choose_host_linear("auto")
    table, limits, kept = [], [], {}
    with torch.inference_mode():
        for rows in ROWS:
            inputs = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in layers[0]}}
            variants = [Variant(name, partial(_seconds, linear_of(name), layers, inputs)) for name in (TORCH, ONEDNN)]
            kept[f"{rows} rows"] = samples = measure(variants, options.rounds, seed=options.seed)
            rates = {name: rows * flops / samples.median(name) for name in (TORCH, ONEDNN)}
            table.append([rows, *rates.values(), rates[taken] / max(rates.values())])
            limits.append(Limit(f"rate of {taken} over the faster one at {rows} rows", table[-1][-1], ">=", 0.8))
    columns = [Column("rows", "count"), *(Column(f"{name}, FLOP/s", "count") for name in (TORCH, ONEDNN))]
    return Report(
        "serve_linear",
        options.device,
        settings={"size": size, "taken": taken},
        tables=[
            Table(f"Products of a layer of {size}, float32", [*columns, Column("taken over faster", "ratio")], table)
        ],
        limits=[] if options.quick else limits,
        samples=kept,
    )


def _layers(size: str) -> tuple[list[list[torch.Tensor]], int]:
    """The weights of the model's layers, and the floating-point operations that one row takes in all of them."""
    import torch

    hidden, inner = SIZES[size]["hidden_size"], SIZES[size]["intermediate_size"]
    shapes = [(hidden, hidden), (hidden // 2, hidden), (hidden // 2, hidden), (hidden, hidden)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    count = SIZES[size]["num_hidden_layers"]
    weights = [[torch.randn(shape) for shape in shapes] for _ in range(count)]
    return weights, 2 * count * sum(out * into for out, into in shapes)


def _seconds(linear: Linear, layers: list[list[torch.Tensor]], inputs: dict[int, torch.Tensor]) -> float:
    begun = time.perf_counter()
    for layer in layers:
        for weight in layer:
            linear(inputs[weight.shape[1]], weight)
    return time.perf_counter() - begun
