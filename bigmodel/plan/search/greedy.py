"""The greedy placement: as many bytes as possible resident on accelerators, the rest streamed through slots.

What is not resident on an accelerator lies in RAM or is viewed on disk, copied into a slot on the main device when its
turn comes, and run there. A unit too large for the slots runs on the CPU where that is allowed. If the accelerators
cannot hold what they must, the CPU runs everything.

Devices are filled in order (`fill_in_order`); `balanced_caps` are the budgets under which that spreads a model evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...devices import DISK, HOST
from ..memory.usage import MemoryUsage
from ..result.budgets import Key, is_accelerator
from .items import Capacity, GroupPlacement, Item


def place_greedily(items: Sequence[Item], capacity: Capacity) -> GroupPlacement | None:
    """Return the greedy placement, or None if the items cannot be placed under the budgets."""
    best: GroupPlacement | None = None
    for slot_bytes, slots in _slot_choices(items, capacity):
        placement = _place_with_slots(items, capacity, slot_bytes, slots)
        if placement is not None and (best is None or _score(items, placement) > _score(items, best)):
            best = placement
        if best is not None and all(map(is_accelerator, best.storage)):
            return best
    return best or _on_host(items, capacity)


def _score(items: Sequence[Item], placement: GroupPlacement) -> tuple[int, int]:
    """Return the bytes that run on accelerators, then the bytes resident there: the more the better."""
    run = sum(it.weights for it, key in zip(items, placement.execution, strict=True) if is_accelerator(key))
    resident = sum(it.weights for it, key in zip(items, placement.storage, strict=True) if is_accelerator(key))
    return run, resident


def _slot_choices(items: Sequence[Item], capacity: Capacity) -> Iterator[tuple[int, int]]:
    """Yield (bytes of a slot, slots): nothing streamed first, then ever larger slots."""
    if not capacity.accelerators:
        return
    yield 0, 0
    for slot_bytes in sorted({item.slot_bytes for item in items if item.slot_bytes}):
        for slots in range(1, capacity.slots + 1):
            yield slot_bytes, slots


def _place_with_slots(items: Sequence[Item], capacity: Capacity, slot_bytes: int, slots: int) -> GroupPlacement | None:
    """Place with `slots` slots of `slot_bytes` bytes reserved on the main device; None if that does not fit."""
    streamable = [item.slot_bytes <= slot_bytes for item in items]
    working = 0
    while True:
        bins = _accelerator_bins(capacity, slots * slot_bytes + working)
        if bins is None or not _pin(items, capacity, bins):
            return None
        left: list[int] = []
        for turn in (False, True):  # what cannot be streamed is placed first
            chosen = (i for i, item in enumerate(items) if streamable[i] is turn and not item.pinned)
            left += fill_in_order(((i, items[i].nbytes) for i in chosen), bins)
        streamed = [index for index in left if streamable[index]]
        needed = sum(items[index].working for index in streamed)
        if needed <= working:
            break
        working = needed
    if sum(items[index].streams for index in streamed) > 1 and slots < capacity.slots:
        return None
    if len(streamed) < len(left) and not capacity.host_compute:
        return None
    placed = {index: bin_.device for bin_ in bins for index in bin_.placed}
    execution = {**placed, **{i: capacity.main if streamable[i] else HOST for i in left}}
    used = any(items[index].slot_bytes for index in streamed)
    return _hold_the_rest(items, capacity, placed, execution, (slots, slot_bytes) if used else (0, 0))


def _accelerator_bins(capacity: Capacity, reserve: int) -> list[Bin] | None:
    bins = []
    for key in capacity.accelerators:
        free = capacity.budgets[key] - capacity.activations - (reserve if key == capacity.main else 0)
        if free < 0 and key == capacity.main:
            return None
        if free >= 0:
            bins.append(Bin(key, free))
    return bins


def _pin(items: Sequence[Item], capacity: Capacity, bins: Sequence[Bin]) -> bool:
    """Place the pinned items on the main device; False if they do not fit."""
    main = next((bin_ for bin_ in bins if bin_.device == capacity.main), None)
    for index, item in enumerate(items):
        if item.pinned:
            if main is None or not main.fits(item.nbytes):
                return False
            main.place(index, item.nbytes)
    return True


def _on_host(items: Sequence[Item], capacity: Capacity) -> GroupPlacement | None:
    """Place everything on the host: the CPU runs it all."""
    return _hold_the_rest(items, capacity, {}, dict.fromkeys(range(len(items)), HOST), (0, 0))


def _hold_the_rest(
    items: Sequence[Item],
    capacity: Capacity,
    placed: Mapping[int, Key],
    execution: Mapping[int, Key],
    slots: tuple[int, int],
) -> GroupPlacement | None:
    """Return the placement with the items that are on no accelerator in RAM, or on disk where RAM is full."""
    host_runs = [index for index, key in execution.items() if key == HOST]
    working = sum(items[i].working for i in host_runs) + (capacity.activations if host_runs else 0)
    free = capacity.budgets.get(HOST, 0) - working
    if free < 0 and working:
        return None
    rest = {i: item.held_bytes(is_accelerator(execution[i])) for i, item in enumerate(items) if i not in placed}
    viewed = {i for i in host_runs if items[i].streams and capacity.activations}
    staged = {i for i in rest if is_accelerator(execution[i]) and items[i].streams and capacity.activations}
    bins = _in_ram_or_on_disk(rest, viewed, staged, max(free, 0), capacity)
    if bins is None:
        return None
    storage = {**placed, **{index: bin_.device for bin_ in bins for index in bin_.placed}}
    order = range(len(items))
    main = capacity.main if any(is_accelerator(key) for key in execution.values()) else HOST
    return GroupPlacement(tuple(storage[i] for i in order), tuple(execution[i] for i in order), main, *slots)


def _in_ram_or_on_disk(
    rest: Mapping[int, int], viewed: Collection[int], staged: Collection[int], ram: int, capacity: Capacity
) -> list[Bin] | None:
    """Fill RAM, less what the items that end up on disk pass through; None if they do not fit.

    Args:
        rest: bytes by item.
        viewed: items that the host computes, through the read-ahead window if on disk.
        staged: items that are streamed, staged in RAM if on disk.
        ram: free bytes of RAM.
        capacity: the budgets.
    """
    if not capacity.budgets.get(HOST):
        staged = ()
    window = 0
    while window <= ram:
        bins = [Bin(HOST, ram - window), Bin(DISK, capacity.budgets.get(DISK))]
        if fill_in_order(rest.items(), bins):
            return None
        passing = MemoryUsage(HOST, staging_bytes=capacity.staging_bytes)
        for index in bins[1].placed:
            if index in viewed:
                passing.add_viewed(rest[index])
            elif index in staged:
                passing.add_staged(rest[index])
        needed = passing.total(HOST)
        if needed <= window:
            return bins
        window = needed
    return None


@dataclass
class Bin:
    """A device being filled.

    Attributes:
        device: its key.
        free: bytes that may still be placed; None for no limit.
        placed: indices of the items placed.
    """

    device: int | str
    free: int | None
    placed: list[int] = field(default_factory=list)

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more may be placed."""
        return self.free is None or nbytes <= self.free

    def place(self, index: int, nbytes: int) -> None:
        """Place item `index` of `nbytes`."""
        self.placed.append(index)
        if self.free is not None:
            self.free -= nbytes


def fill_in_order(items: Iterable[tuple[int, int]], bins: Sequence[Bin]) -> list[int]:
    """Place items in order, keeping neighbours together, and return the indices of those that fit nowhere.

    An item goes to the current bin, else to the next bin that has room, which becomes the current one. An item too
    large for every bin from there on is passed over, so that one huge item does not push away all that follow it. In
    the end the items that were passed over are tried in every bin.

    Args:
        items: (index, bytes) of each item, in execution order.
        bins: devices in the order they are to be filled; changed in place.
    """
    current, passed = 0, []
    for index, cost in items:
        chosen = next((at for at in range(current, len(bins)) if bins[at].fits(cost)), None)
        if chosen is None:
            passed.append((index, cost))
        else:
            current = chosen
            bins[chosen].place(index, cost)
    return [index for index, cost in passed if not _place_anywhere(index, cost, bins)]


def _place_anywhere(index: int, cost: int, bins: Sequence[Bin]) -> bool:
    for candidate in bins:
        if candidate.fits(cost):
            candidate.place(index, cost)
            return True
    return False


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
    return not fill_in_order(enumerate(costs), [Bin(index, size) for index, size in enumerate(capacities)])


def _smallest(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest value that is `enough`, by bisection; `high` is enough."""
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high
