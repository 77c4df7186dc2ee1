"""The greedy placement: as many bytes as possible resident on accelerators, the rest streamed through slots.

What is not resident on an accelerator lies in RAM or is viewed on disk, copied into a slot on the main device when its
turn comes, and run there. A unit too large for the slots runs on the CPU where that is allowed. If the accelerators
cannot hold what they must, the CPU runs everything.

Devices are filled in order (`fill_in_order`); `balanced_caps` are the budgets under which that spreads a model evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...devices import HOST
from ..result.budgets import Key, is_accelerator
from .filling import Filling, fill_around, fill_in_order, hold_away
from .items import Capacity, GroupPlacement, Item


def place_greedily(items: Sequence[Item], capacity: Capacity) -> GroupPlacement | None:
    """Return the greedy placement, or None if the items cannot be placed under the budgets."""
    best: GroupPlacement | None = None
    # Nothing is streamed first, then ever larger groups.
    slot_sizes = {item.slot_bytes for item in items if item.can_stream} | {0}
    for slot_bytes in sorted(slot_sizes) if capacity.accelerators else ():
        placement = _place_with_slots(items, capacity, slot_bytes)
        if placement is not None and (best is None or _score(items, placement) > _score(items, best)):
            best = placement
        if best is not None and all(map(is_accelerator, best.storage)):
            return best
    return best or place_away(items, capacity, dict.fromkeys(range(len(items)), HOST))


def place_away(items: Sequence[Item], capacity: Capacity, away: Mapping[int, Key]) -> GroupPlacement | None:
    """Return the placement with some groups off the accelerators and all others on them; None if that does not fit.

    Args:
        items: all groups.
        capacity: the budgets.
        away: the groups off the accelerators, with the device that runs each.
    """
    filling, left = fill_around(items, capacity, away, (i for i in range(len(items)) if i not in away))
    return None if left else _with_away_held(filling, away)


def _with_away_held(filling: Filling, away: Mapping[int, Key]) -> GroupPlacement | None:
    hold_away(filling, away)
    return filling.placement()


def _score(items: Sequence[Item], placement: GroupPlacement) -> tuple[int, int]:
    """Return the bytes that run on accelerators, then the bytes resident there: the more the better."""
    run = sum(it.weights for it, key in zip(items, placement.execution, strict=True) if is_accelerator(key))
    resident = sum(it.weights for it, key in zip(items, placement.storage, strict=True) if is_accelerator(key))
    return run, resident


def _place_with_slots(items: Sequence[Item], capacity: Capacity, slot_bytes: int) -> GroupPlacement | None:
    """Return the placement in which no slot is larger than `slot_bytes`; None if there is none.

    The groups that do not fit the accelerators leave them, which takes slots there, until all others fit.
    """
    streamable = [item.can_stream and item.slot_bytes <= slot_bytes for item in items]
    order = sorted(range(len(items)), key=streamable.__getitem__)  # what cannot be streamed is placed first
    away: dict[int, Key] = {}
    while True:
        filling, left = fill_around(items, capacity, away, (index for index in order if index not in away))
        if not left:
            return _with_away_held(filling, away)
        if any(items[i].pinned or not (streamable[i] or capacity.host_compute) for i in left):
            return None
        away.update({index: capacity.main if streamable[index] else HOST for index in left})


def balanced_caps(costs: Sequence[int], capacities: Sequence[int], low_zero: bool = False) -> list[int]:
    """Return caps, none above its capacity, under which filling in order is most even.

    Args:
        costs: bytes of each item, in execution order.
        capacities: bytes of each device, in the order they are filled.
        low_zero: the first device takes only what does not fit the others.

    Returns:
        The capacities themselves when the items do not all fit.
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
    free = list(capacities)

    def place(item: int, device: int) -> bool:
        if costs[item] > free[device]:
            return False
        free[device] -= costs[item]
        return True

    return not fill_in_order(range(len(costs)), len(free), place)


def _smallest(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest value that is `enough`, by bisection; `high` is enough."""
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high
