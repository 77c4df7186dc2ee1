"""The error when no placement fits: the missing bytes, and budgets that would suffice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...devices import format_size
from ...errors import BudgetError
from ..result.budgets import Key

Fits = Callable[[Mapping[Key, int]], bool]
"""Whether something fits when the budgets are these."""


def smallest_budget(budgets: Mapping[Key, int], device: Key, enough: int, fits: Fits) -> int | None:
    """Return the smallest budget of `device` that makes it fit, the others as they are.

    Args:
        budgets: bytes by device key.
        device: whose budget may grow.
        enough: a budget that is large enough if any is.
        fits: called with changed budgets.

    Returns:
        Bytes; None if no budget of this device alone will do.
    """
    low, high = budgets.get(device, 0), max(enough, budgets.get(device, 0))
    if not fits({**budgets, device: high}):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits({**budgets, device: middle}):
            high = middle
        else:
            low = middle + 1
    return high


def budget_error(budgets: Mapping[Key, int], needed: int, fits: Fits) -> BudgetError:
    """Return the error for a model that does not fit, with the smallest budget of each device that would do.

    Args:
        budgets: bytes by device key, as planned with.
        needed: bytes that are enough on any one device.
        fits: whether the model fits under other budgets.
    """
    remedies = []
    for device, size in budgets.items():
        enough = smallest_budget(budgets, device, needed, fits)
        if enough is not None:
            remedies.append(f"{device!r}: {format_size(enough)} ({enough} bytes, {format_size(enough - size)} more)")
    given = ", ".join(f"{device!r}: {format_size(size)}" for device, size in budgets.items())
    if remedies:
        advice = f"one of these budgets would do: {'; '.join(remedies)}"
    else:
        advice = "no single budget would do: raise several, or allow 'disk'"
    return BudgetError(f"the model does not fit the budgets ({given}); {advice}")
