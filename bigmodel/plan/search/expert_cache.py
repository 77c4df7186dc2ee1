"""The size of a cache of experts, where none is given: the default, or less if that leaves accelerators idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...profile import Profile
from ..memory.assignment import Assignment
from ..result.budgets import is_accelerator
from .items import Capacity

HALVINGS = 10
"""How often the default size is halved until an accelerator has room for it."""


def with_cache_that_fits(
    profile: Profile, capacity: Capacity, greedy: Callable[[Capacity], Assignment]
) -> tuple[Capacity, Assignment]:
    """Return the greedy assignment, and the capacity that it keeps to.

    The cache of experts is the largest with which an accelerator runs anything: of the default size, or of that halved
    up to `HALVINGS` times. If there is none, it has the default size.

    Args:
        profile: the model.
        capacity: the budgets. A cache whose size is given stays as it is.
        greedy: returns the assignment under a capacity.

    Raises:
        BudgetError: `greedy` finds none.
    """
    found = greedy(capacity)
    if capacity.expert_cache is not None or not capacity.accelerators or _runs_any(found):
        return capacity, found
    default = capacity.slots * max(unit.slot_bytes() for unit in profile.units)
    for turn in range(1, HALVINGS + 1):
        smaller = replace(capacity, expert_cache=default >> turn)
        tried = greedy(smaller)
        if _runs_any(tried):
            return smaller, tried
    return capacity, found


def _runs_any(assignment: Assignment) -> bool:
    return any(map(is_accelerator, assignment.execution))
