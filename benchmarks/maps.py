"""How long does a decode step take with the search's plans, beside the device map of accelerate?

Every map is dispatched by bigmodel, on a virtual accelerator with a link of a given bandwidth, so that only the map
differs. Budgets are fractions of the model's weights. accelerate counts only weights, so its map exceeds them; a second
map of accelerate is made under a reduced budget, such that the measured peak keeps the real one, and plans are compared
with that.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, measure
from .harness.report import Cell
from .planning import BANDWIDTH, make

if TYPE_CHECKING:
    from .steps import Decoder

ACCELERATE = "accelerate's map"
FITTED = "accelerate's map, budget kept"
STREAMED = "plan, rest streamed"
SHARED = "plan, host computes too"
FAMILIES = ("llama", "gpt2")
SHARES = (0.3, 0.6, 0.9)
CONTEXT = 64
NO_SLOWER = 1.05
"""Tolerance of the measurement: a plan that is equally fast may measure so much slower."""

DEVICES = ("virtual",)
"""Devices that this benchmark supports."""
ONLY = "its plans are made for a link of a set bandwidth, which only a virtual accelerator has"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=int, default=4, help="decode steps behind each value")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure the step of every map, in random order, round by round."""
    import torch

    from bigmodel.devices import virtual

    torch.set_num_threads(options.threads or 1)
    virtual.enable(1, bandwidth=BANDWIDTH)
    rows: list[list[Cell]] = []
    kept: dict[str, Samples] = {}
    for family in FAMILIES[:1] if options.quick else FAMILIES:
        folder = make(family, options.workdir, options.quick)
        for share in SHARES[1:2] if options.quick else SHARES:
            decoders, peaks = _decoders(folder, share)
            variants = [Variant(name, partial(one.seconds_per_step, options.steps)) for name, one in decoders.items()]
            samples = measure(variants, options.rounds, seed=options.seed)
            kept[f"{family} {share}"] = samples
            rows += [_row(family, share, name, samples, peaks) for name in decoders]
    return report(options, rows, kept)


def report(options: argparse.Namespace, rows: list[list[Cell]], samples: dict[str, Samples]) -> Report:
    """Return the table, and the limit that no plan is slower than accelerate's map."""
    columns = [Column("model"), Column("room", "percent"), Column("map"), Column("step", "seconds")]
    columns += [Column("over accelerate's that fits", "ratio"), Column("budget kept")]
    worst = max(
        ratio for _, _, name, _, ratio, _ in rows if name not in (ACCELERATE, FITTED) and isinstance(ratio, float)
    )
    return Report(
        "maps",
        options.device,
        settings={"steps": options.steps, "link": BANDWIDTH},
        tables=[Table("A decode step by each map", columns, rows)],
        limits=[Limit("slowest plan over accelerate's map that keeps the budget", worst, "<=", NO_SLOWER)],
        notes=["room: the accelerator's budget as a fraction of the weights"],
        samples=samples,
    )


def _row(family: str, share: float, name: str, samples: Samples, peaks: dict[str, bool]) -> list[Cell]:
    over = 1.0 if name == FITTED else samples.ratio(name, FITTED).median
    return [family, share, name, samples.median(name), over, "yes" if peaks[name] else "no"]


def _decoders(folder: Path, share: float) -> tuple[dict[str, Decoder], dict[str, bool]]:
    """Return a decoder for each map, and whether its peak keeps the budget."""
    import gc

    from accelerate import infer_auto_device_map

    from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, torch_device
    from bigmodel.dispatch import from_pretrained
    from bigmodel.plan import Plan, plan

    from .models import skeleton
    from .steps import Decoder

    model: Any = skeleton(folder)
    budget = int(share * sum(parameter.nbytes for parameter in model.parameters()))
    budgets: dict[Any, Any] = {0: budget, "cpu": 2**36}
    classes = model._no_split_modules
    shapes: dict[str, Any] = {"batch_size": 1, "context_length": CONTEXT, "new_tokens": CONTEXT // 2}

    def by_accelerate(room: int) -> dict[str, Any]:
        return dict(infer_auto_device_map(model, {0: room, "cpu": 2**36}, no_split_module_classes=classes))

    def decoding(device_map: Any) -> tuple[Decoder, int]:
        gc.collect()
        before = memory_allocated(0)
        planned = isinstance(device_map, Plan)
        main = device_map.main_device if planned else 0  # a plan may find the host alone faster
        model = from_pretrained(folder, device_map, main_device=None if planned else 0)
        decoder = Decoder(model, str(torch_device(main)))
        reset_peak_memory(0)
        decoder.seconds_per_step(2)
        return decoder, max_memory_allocated(0) - before

    found = {
        ACCELERATE: decoding(by_accelerate(budget)),
        STREAMED: decoding(plan(folder, budgets, objective="latency", **shapes)),
        SHARED: decoding(plan(folder, budgets, objective="latency", offload="auto", **shapes)),
    }
    room, found[FITTED] = budget, found[ACCELERATE]
    while found[FITTED][1] > budget and room > 0:
        room -= max(found[FITTED][1] - budget, budget // 100)
        found[FITTED] = decoding(by_accelerate(max(room, 1)))
    return {name: decoder for name, (decoder, _) in found.items()}, {
        name: peak <= budget for name, (_, peak) in found.items()
    }
