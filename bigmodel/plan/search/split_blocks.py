"""Blocks split into smaller parts, where slots that hold whole blocks take much of an accelerator's memory.

A slot is as large as the largest part that is streamed. With few large blocks, slots for one matrix or attention leave
room for more resident weights, for keys and values, or for a larger batch. With blocks that do not fit at all they let
the accelerator run the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...errors import BudgetError
from ..result.budgets import is_accelerator
from ..result.plan import Plan

GAIN = 0.03
"""Least share of the seconds that split blocks must save."""

VISIT = 1e-4
"""Seconds that Python takes to visit a streamed part, at most: split blocks have more of them."""

SPLIT_BLOCKS = "blocks are split, as slots that hold whole ones take too much of the accelerator's memory"


def with_split_blocks(plan_of: Callable[[bool], Plan], objective: str | None) -> Plan:
    """Return the plan of whole blocks, or of split ones where only these run on an accelerator, or where they are
    predicted to be faster.

    Args:
        plan_of: returns the plan of whole blocks (False) or split ones (True). It raises BudgetError if nothing fits.
        objective: the quantity that is minimised, as for `plan`.

    Raises:
        BudgetError: whole blocks do not fit, nor do split ones on an accelerator; the message is about whole blocks.
    """
    try:
        made = plan_of(False)
    except BudgetError:
        found = _planned_split(plan_of)
        if found is None:
            raise
        return found
    found = _planned_split(plan_of) if _may_gain(made) else None
    return found if found is not None and _is_better(found, made, objective) else made


def _planned_split(plan_of: Callable[[bool], Plan]) -> Plan | None:
    """Return the plan of split blocks; None if nothing fits, or nothing on an accelerator."""
    try:
        found = plan_of(True)
    except BudgetError:
        return None
    return replace(found, notes=(*found.notes, SPLIT_BLOCKS)) if _uses_accelerators(found) else None


def _uses_accelerators(made: Plan) -> bool:
    return any(is_accelerator(part.runs_on) for part in made.parts)


def _may_gain(made: Plan) -> bool:
    """Whether smaller slots may save a share `GAIN` of the seconds, or let an accelerator run what the host runs."""
    if made.guarded or made.expert_cache:
        return False
    if not _uses_accelerators(made):
        return True
    fetched = sum(part.bytes for part in made.streamed)
    freed = made.slots * made.slot_bytes + sum(device.kv_slots for device in made.devices.values())
    return made.prediction is not None and (bool(made.kv_on_host) or freed >= GAIN * fetched > 0)


def _is_better(found: Plan, made: Plan, objective: str | None) -> bool:
    """Whether a plan of split blocks is to replace one of whole blocks."""
    if found.prediction is None or made.prediction is None:
        return not _uses_accelerators(made)
    return _seconds_of_step(found, objective) <= (1 - GAIN) * _seconds_of_step(made, objective)


def _seconds_of_step(made: Plan, objective: str | None) -> float:
    """Return the seconds of a step, with its part of the prompt if throughput is minimised."""
    assert made.prediction is not None
    rate = made.tokens_per_second if objective == "throughput" else None
    return (made.batch_size / rate if rate else made.prediction.token) + VISIT * len(made.streamed)
