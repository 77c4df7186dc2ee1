"""Fewer slots, where the usual number of them leaves an accelerator no memory for anything.

With one slot no copy runs beside compute, which is slower than with two, and still lets the accelerator run the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...errors import BudgetError
from ..result.budgets import is_accelerator
from ..result.plan import Plan

ONE_SLOT = "parts are streamed through one slot, as two do not fit: copies do not run beside compute"


def with_slots(plan_of: Callable[[int], Plan], slots: int) -> Plan:
    """Return the plan of a number of slots; if that leaves all accelerators idle, the one of fewer that does not.

    Args:
        plan_of: returns the plan of a number of slots. It raises BudgetError if nothing fits.
        slots: how many are wanted, 1 or more.

    Raises:
        BudgetError: nothing fits with any number; the message is that for one slot, which needs least.
    """
    idle: Plan | None = None
    refused: BudgetError | None = None
    for count in range(slots, 0, -1):
        try:
            found = plan_of(count)
        except BudgetError as error:
            refused = error
            continue
        if any(is_accelerator(part.runs_on) for part in found.parts):
            return replace(found, notes=(*found.notes, ONE_SLOT)) if count == 1 < slots else found
        idle = idle or found
    if idle is None:
        assert refused is not None
        raise refused
    return idle
