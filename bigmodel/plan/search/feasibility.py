"""Whether a placement of groups fits the budgets: the memory check that the search and its oracle share."""

from __future__ import annotations

from collections.abc import Sequence

from ...devices import DISK, HOST
from ..memory.slots import read_ahead_window
from ..result.budgets import Key, is_accelerator
from .items import Capacity, GroupPlacement, Item

Option = tuple[Key, Key]
"""Storage and execution device of a group."""


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
        for item, (storage, execution) in zip(items, chosen, strict=True)
        if is_accelerator(execution) and not is_accelerator(storage) and item.slot_bytes
    ]
    slot_bytes = max((item.slot_bytes for item in streamed), default=0)
    turns = sum(item.streams for item in streamed)
    slots = min(turns, capacity.slots)
    used = dict.fromkeys(capacity.budgets, 0)
    running: set[Key] = {capacity.main} if any(is_accelerator(execution) for _, execution in chosen) else {HOST}
    for item, (storage, execution) in zip(items, chosen, strict=True):
        streams = is_accelerator(execution) and not is_accelerator(storage)
        used[storage] = used.get(storage, 0) + item.held_bytes(streams)
        used[execution] = used.get(execution, 0) + item.working
        if item.streams:
            running.add(execution)
    used[capacity.main] = used.get(capacity.main, 0) + slots * slot_bytes
    if capacity.activations:
        viewed = (item for item, option in zip(items, chosen, strict=True) if option == (DISK, HOST))
        used[HOST] = used.get(HOST, 0) + read_ahead_window([item.weights for item in viewed if item.streams])
    for key in running:
        used[key] = used.get(key, 0) + capacity.activations
    for key, nbytes in used.items():
        if nbytes > capacity.budgets.get(key, nbytes if key == DISK else 0):
            return None
    main = capacity.main if capacity.main in running else HOST
    return GroupPlacement(
        tuple(storage for storage, _ in chosen),
        tuple(execution for _, execution in chosen),
        main,
        slots,
        slot_bytes,
    )
