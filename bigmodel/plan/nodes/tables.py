"""A plan over nodes as tables."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...devices import format_size
from .result import NodesPlan, Stage

PLAIN_WIDTH = 110


def table(plan: NodesPlan) -> RenderableType:
    """Return the plan as a rich renderable: its stages, its links, its predicted time, its notes."""
    first = plan.stages[0].plan
    heading = f"{plan.model} over {len(plan.stages)} nodes, batch {first.batch_size}, context {first.context_length}"
    blocks: list[RenderableType] = [Text(heading), _stages(plan)]
    if plan.crossings:
        blocks.append(_crossings(plan))
    prefill = "" if plan.prefill is None else f"{plan.prefill:.4g} s for the prompt, "
    blocks.append(
        Text(
            f"predicted: {prefill}{plan.step:.4g} s for a step of generation, all nodes one after another; "
            f"{plan.slowest:.4g} s for the slowest"
        )
    )
    notes = {note: None for stage in plan.stages for note in stage.plan.notes}
    return Group(*blocks, *(Text(f"note: {note}") for note in notes))


def plain_text(plan: NodesPlan) -> str:
    """Return the tables as text without colour."""
    stream = io.StringIO()
    Console(file=stream, width=PLAIN_WIDTH, color_system=None).print(table(plan))
    return stream.getvalue().rstrip()


def _stages(plan: NodesPlan) -> Table:
    drawn = Table("node", "layers", "weights", "streamed", "device: planned of budget", "s per step", "bottleneck")
    for stage in plan.stages:
        predicted = stage.plan.prediction
        drawn.add_row(
            stage.node,
            f"{stage.start} to {stage.stop - 1}",
            format_size(sum(part.bytes for part in stage.plan.parts)),
            format_size(sum(part.bytes for part in stage.plan.streamed)),
            _devices(stage),
            "" if predicted is None else f"{predicted.token:.4g}",
            "" if predicted is None else predicted.binds,
        )
    return drawn


def _devices(stage: Stage) -> str:
    return "\n".join(
        f"{key}: {format_size(use.total)}" + ("" if use.budget is None else f" of {format_size(use.budget)}")
        for key, use in stage.plan.devices.items()
        if use.total
    )


def _crossings(plan: NodesPlan) -> Table:
    drawn = Table("from", "to", "bytes per step", "s per step")
    for crossing in plan.crossings:
        drawn.add_row(crossing.source, crossing.target, format_size(crossing.step_bytes), f"{crossing.step:.4g}")
    return drawn
