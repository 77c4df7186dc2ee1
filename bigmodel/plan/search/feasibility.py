"""Whether groups fit where they are placed: what each option adds to the memory count, and the check of the budgets."""

from __future__ import annotations

from collections.abc import Sequence

from ...devices import DISK, HOST
from ..memory.usage import ACTIVATIONS, KV_CACHE, WEIGHTS, MemoryUsage
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
    usage = MemoryUsage(capacity.main, capacity.slots, capacity.staging_bytes)
    running: set[Key] = {capacity.main} if any(is_accelerator(execution) for _, execution in chosen) else {HOST}
    for item, option in zip(items, chosen, strict=True):
        add_group(usage, item, option, capacity)
        if item.streams:
            running.add(option[1])
    for key in running:
        usage.add(key, ACTIVATIONS, capacity.activations)
    if usage.over(capacity.budgets):
        return None
    main = capacity.main if capacity.main in running else HOST
    storage, execution = tuple(storage for storage, _ in chosen), tuple(execution for _, execution in chosen)
    return GroupPlacement(storage, execution, main, usage.slots, usage.slot_bytes)


def add_group(usage: MemoryUsage, item: Item, option: Option, capacity: Capacity) -> None:
    """Add the bytes that a group takes under an option; `remove_group` removes them."""
    storage, execution = option
    streams = is_accelerator(execution) and not is_accelerator(storage)
    usage.add(storage, WEIGHTS, item.held_bytes(streams))
    usage.add(execution, KV_CACHE, item.working)
    if streams and item.slot_bytes:
        usage.add_streamed(item.slot_bytes, item.streams)
    if storage == DISK and item.streams and capacity.activations:
        if streams:
            usage.add_staged(item.held_bytes(streams))
        else:
            usage.add_viewed(item.weights)


def remove_group(usage: MemoryUsage, item: Item, option: Option, capacity: Capacity) -> None:
    """Remove what `add_group` added for the same group and option."""
    storage, execution = option
    streams = is_accelerator(execution) and not is_accelerator(storage)
    usage.add(storage, WEIGHTS, -item.held_bytes(streams))
    usage.add(execution, KV_CACHE, -item.working)
    if streams and item.slot_bytes:
        usage.remove_streamed(item.slot_bytes, item.streams)
    if storage == DISK and item.streams and capacity.activations:
        if streams:
            usage.remove_staged(item.held_bytes(streams))
        else:
            usage.remove_viewed(item.weights)
