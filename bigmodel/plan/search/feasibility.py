"""Whether groups fit where they are put: the memory side of the search, on which it and its oracle agree."""

from __future__ import annotations

from collections.abc import Sequence

from ...devices import DISK, HOST
from ..memory.slots import read_ahead_window
from ..result.budgets import Key, is_accelerator
from .items import Capacity, GroupPlacement, Item

Option = tuple[Key, Key]
"""Where a group is held, and where it runs."""


def options_of(item: Item, capacity: Capacity) -> list[Option]:
    """Return what may be done with a group: resident on each accelerator, streamed, or run on the CPU."""
    if not capacity.accelerators:
        return [(HOST, HOST), (DISK, HOST)]
    if item.pinned:
        return [(capacity.main, capacity.main)]
    found: list[Option] = [(key, key) for key in capacity.accelerators]
    found += [(HOST, capacity.main), (DISK, capacity.main)]
    if capacity.host_compute and item.streams:
        found += [(HOST, HOST), (DISK, HOST)]
    return found


def feasible_placement(items: Sequence[Item], capacity: Capacity, chosen: Sequence[Option]) -> GroupPlacement | None:
    """Return the placement in which each group has its option, with the slots it needs; None past the budgets."""
    streamed = [
        item
        for item, (held, runs) in zip(items, chosen, strict=True)
        if is_accelerator(runs) and not is_accelerator(held) and item.slab
    ]
    slab = max((item.slab for item in streamed), default=0)
    turns = sum(item.streams for item in streamed)
    slots = min(turns, capacity.slots)
    used = dict.fromkeys(capacity.budgets, 0)
    running: set[Key] = {capacity.main} if any(is_accelerator(runs) for _, runs in chosen) else {HOST}
    for item, (held, runs) in zip(items, chosen, strict=True):
        streams = is_accelerator(runs) and not is_accelerator(held)
        used[held] = used.get(held, 0) + item.held_bytes(streams)
        used[runs] = used.get(runs, 0) + item.working
        if item.streams:
            running.add(runs)
    used[capacity.main] = used.get(capacity.main, 0) + slots * slab
    if capacity.activations:
        viewed = (item for item, option in zip(items, chosen, strict=True) if option == (DISK, HOST))
        used[HOST] = used.get(HOST, 0) + read_ahead_window([item.weights for item in viewed if item.streams])
    for key in running:
        used[key] = used.get(key, 0) + capacity.activations
    for key, nbytes in used.items():
        if nbytes > capacity.budgets.get(key, nbytes if key == DISK else 0):
            return None
    main = capacity.main if capacity.main in running else HOST
    return GroupPlacement(tuple(held for held, _ in chosen), tuple(runs for _, runs in chosen), main, slots, slab)
