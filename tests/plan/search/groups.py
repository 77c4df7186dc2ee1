"""Groups to place, by their bytes; the placement of given options; devices filled with items of given bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bigmodel.plan.memory.usage import PassingUnit
from bigmodel.plan.search.filling import Filling, Option, fill_in_order
from bigmodel.plan.search.items import Capacity, GroupPlacement, Item


def group(weights: int, working: int = 0, slot: int | None = None, offloaded: int | None = None) -> Item:
    """Return a group of one unit; `slot` is as large as its weights unless given."""
    unit = PassingUnit(slot=weights if slot is None else slot, staged=weights, viewed=weights)
    return Item(weights, working, (unit,), offloaded=offloaded)


def placement_of(items: Sequence[Item], capacity: Capacity, options: Iterable[Option]) -> GroupPlacement | None:
    """Return the placement in which each group has its option; None if it passes a budget."""
    filling = Filling(items, capacity)
    for index, option in enumerate(options):
        filling.add(index, option)
    return filling.placement()


def fill(costs: Sequence[int], capacities: Sequence[int | None]) -> tuple[list[list[int]], list[int]]:
    """Return the items that each device gets, and those that fit nowhere."""
    placed: list[list[int]] = [[] for _ in capacities]

    def place(item: int, device: int) -> bool:
        capacity = capacities[device]
        fits = capacity is None or sum(costs[one] for one in [*placed[device], item]) <= capacity
        if fits:
            placed[device].append(item)
        return fits

    return placed, fill_in_order(range(len(costs)), len(placed), place)
