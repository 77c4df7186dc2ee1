"""Budgets that spread a model evenly over the accelerators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from ...arguments import check_flags, check_model
from ...devices import DeviceLike
from ...profile import DtypeLike, profile_units
from ..result.budgets import HEADROOM, is_accelerator, read_budgets
from .greedy import Bin, fill_in_order
from .groups import tie_groups


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return budgets under which filling the accelerators in order spreads the model evenly over them.

    The caps are the smallest that still let everything fit in order, so no accelerator holds more than it must.
    A model that does not fit on the accelerators together keeps the budgets as they are.

    Args:
        model: any module, also on meta.
        max_memory: budgets as `get_max_memory` takes them; None: what is free.
        no_split_module_classes: class names not to be split; None: find them.
        dtype: floating point tensors count as this dtype.
        special_dtypes: dtype by tensor name, stronger than `dtype`.
        low_zero: keep the first accelerator as empty as possible (it will do other work, such as generation).

    Raises:
        PlanError: an argument makes no sense; the message names it.
        SizeError: a budget is not a size.
        DeviceError: a budget is of no device.
    """
    check_model(model)
    check_flags(low_zero=low_zero)
    budgets = read_budgets(max_memory)
    keys = [key for key, size in budgets.items() if size > 0 and is_accelerator(key)]
    if len(keys) == 1 and max_memory is None:
        budgets[keys[0]] = int(budgets[keys[0]] * HEADROOM)
    if len(keys) < 2:
        return budgets
    units = profile_units(model, dtype, special_dtypes, no_split_module_classes, as_loaded=False)
    caps = balanced_caps([group.nbytes for group in tie_groups(units)], [budgets[k] for k in keys], low_zero)
    budgets.update(zip(keys, caps, strict=True))
    return budgets


def balanced_caps(costs: Sequence[int], capacities: Sequence[int], low_zero: bool = False) -> list[int]:
    """Return caps, none above its capacity, under which filling in order is most even.

    Args:
        costs: bytes of each piece, in execution order.
        capacities: bytes of each device, in the order they are filled.
        low_zero: the first device takes only what the others cannot.

    Returns:
        The capacities themselves when the pieces do not all fit.
    """
    if not _all_fit(costs, capacities):
        return list(capacities)
    if low_zero and len(capacities) > 1:
        first = _smallest(0, capacities[0], lambda cap: _all_fit(costs, [cap, *capacities[1:]]))
        rest = _smallest(
            0, max(capacities[1:]), lambda cap: _all_fit(costs, [first, *(min(cap, c) for c in capacities[1:])])
        )
        return [first, *(min(rest, capacity) for capacity in capacities[1:])]
    cap = _smallest(0, max(capacities), lambda cap: _all_fit(costs, [min(cap, c) for c in capacities]))
    return [min(cap, capacity) for capacity in capacities]


def _all_fit(costs: Sequence[int], capacities: Sequence[int]) -> bool:
    return not fill_in_order(enumerate(costs), [Bin(index, size) for index, size in enumerate(capacities)])


def _smallest(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest value that is `enough`, by bisection; `high` is known to be."""
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high
