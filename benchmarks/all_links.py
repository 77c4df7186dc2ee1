"""Do blocks streamed over several accelerators take one step in as many parts of one link's time, with the same bits?

One row crosses equal blocks, all of which are streamed, as in a step of generation. The plan has room for slots alone,
so it streams over all accelerators that it is given, in turns: their links fetch at once while the row hops from one to
the next. Each link has a set bandwidth, at which one of them takes far longer than the compute. accelerate, in the same
rounds, fetches all blocks over the link of its main device, however many there are.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import BenchmarkError, Column, Limit, Report, Summary, Table, Variant, elapsed, measure
from .harness.report import Cell

if TYPE_CHECKING:
    import torch
    from torch import nn

LIMITS = {2: 0.53, 4: 0.29}
"""By number of accelerators, the most that a step may take of that over one link."""

ACCELERATE = "accelerate"

DEVICES = ("virtual",)
"""Devices that this benchmark supports."""
ONLY = "it sets the bandwidth of several accelerators' links, which only virtual ones allow"
"""Why it supports no others."""


@dataclass(frozen=True)
class Sizes:
    """Number of blocks, more than four accelerators hold at once, their width, bytes per second of each link, and steps
    behind each value."""

    blocks: int
    width: int
    rate: float
    steps: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=int, default=3, help="steps behind each value")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure steps over 1, 2 and 4 accelerators in the same rounds, and compare outputs."""
    import torch

    from bigmodel.devices import virtual

    from .blocks import make_blocks
    from .peers import streamed_by_accelerate

    torch.set_num_threads(options.threads or 1)
    sizes = Sizes(16, 256, 2.5e7, 1) if options.quick else Sizes(24, 1024, 2e8, options.steps)
    counts = (1, *LIMITS)
    virtual.enable(max(counts), bandwidth=sizes.rate)
    try:
        models = {_name(count): streamed(sizes, count) for count in counts}
        models[ACCELERATE] = streamed_by_accelerate(make_blocks(sizes.blocks, sizes.width), "virtual:0")
        x = torch.linspace(-1, 1, sizes.width)[None].to("virtual:0")
        differing = sum(not torch.equal(outputs(model, x), resident_outputs(sizes, x)) for model in models.values())
        variants = [Variant(name, partial(_seconds, model, x, sizes.steps)) for name, model in models.items()]
        samples = measure(variants, options.rounds, seed=options.seed)
    finally:
        virtual.disable()
    one = sizes.blocks * 4 * sizes.width**2 / sizes.rate
    links = {**{_name(count): count for count in counts}, ACCELERATE: 1}
    alone = samples.median(_name(1))
    rows = [_row(name, count, one / count, samples.summary(name), alone) for name, count in links.items()]
    columns = [Column("way"), Column("links", "count"), Column("transfer on each link", "seconds")]
    columns += [Column(name, "seconds") for name in ("step", "step q1", "step q3")]
    return Report(
        "all_links",
        options.device,
        settings={**vars(sizes), "threads": torch.get_num_threads()},
        tables=[
            Table(
                f"{sizes.blocks} blocks of {4 * sizes.width**2:,} bytes, all streamed",
                [*columns, Column("of the step over one link", "ratio")],
                rows,
            )
        ],
        limits=[
            *(
                Limit(f"step over {count} links, of that over one", samples.median(_name(count)) / alone, "<=", most)
                for count, most in LIMITS.items()
            ),
            Limit("outputs that differ from those of the resident model", float(differing), "==", 0, "count"),
        ],
        samples={"links": samples},
    )


def _row(name: str, links: int, transfer: float, step: Summary, alone: float) -> list[Cell]:
    return [name, links, transfer, step.median, step.first_quartile, step.third_quartile, step.median / alone]


def streamed(sizes: Sizes, accelerators: int) -> nn.Module:
    """Return the blocks, dispatched by a plan for so many accelerators that each have room for slots alone.

    Raises:
        BenchmarkError: The plan does not stream over all of them.
    """
    import torch

    from bigmodel.dispatch import dispatch_model
    from bigmodel.plan import plan

    from .blocks import make_blocks

    model = make_blocks(sizes.blocks, sizes.width)
    room = int(2.5 * 4 * sizes.width**2)
    budgets: dict[Any, int] = {**dict.fromkeys(range(accelerators), room), "cpu": 2**40}
    sample = torch.zeros(1, sizes.width)
    found = plan(model, budgets, sample_inputs=(sample,), machine=_machine(sizes.rate))
    used = {part.runs_on for part in found.streamed}
    if len(used) != accelerators or len(found.streamed) != sizes.blocks:
        raise BenchmarkError(f"the plan for {accelerators} accelerators streams {len(found.streamed)} blocks to {used}")
    return dispatch_model(model, found)


def resident_outputs(sizes: Sizes, x: torch.Tensor) -> torch.Tensor:
    """Return the output of the same blocks on one accelerator."""
    from .blocks import make_blocks

    return outputs(make_blocks(sizes.blocks, sizes.width).to(x.device), x)


def outputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a model on the host."""
    import torch

    with torch.inference_mode():
        found: torch.Tensor = model(x)
    return found.cpu()


def _machine(rate: float) -> Any:
    """Return a machine of nominal speeds, whose accelerators have links of `rate` bytes per second."""
    from dataclasses import replace

    from bigmodel.profile.machine.machine import DeviceLinks, LinkSpeed, nominal_machine

    link = LinkSpeed(rate)
    return replace(nominal_machine(), links={"virtual:0": DeviceLinks(link, link, link, link, to_peer=link)})


def _name(accelerators: int) -> str:
    return f"bigmodel, {accelerators} accelerator{'s' if accelerators > 1 else ''}"


def _seconds(model: Any, x: torch.Tensor, steps: int) -> float:
    """Return the mean seconds of `steps` forwards after an unmeasured one, as in generation."""
    import torch

    with torch.inference_mode():
        model(x)
        return elapsed(lambda: [model(x) for _ in range(steps)], "virtual:0") / steps
