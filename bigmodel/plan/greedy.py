"""The greedy placement: as many bytes as possible resident on accelerators, the rest streamed through slots.

What is not resident on an accelerator is held in RAM or viewed on disk. When a streamed unit's turn comes it is
copied into a slot on the main device and runs there. A unit too big for the slots runs on the CPU. If the
accelerators cannot host anything, they are left out and the CPU runs it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..devices import DISK, HOST, is_accelerator
from .fill import Bin, fill_in_order

Key = int | str


@dataclass(frozen=True)
class Item:
    """What placing one group of units takes.

    Attributes:
        nbytes: bytes of its weights and buffers, where it is held.
        kv_cache: bytes of KV cache, on the device where it runs.
        slab: bytes of the largest slot any of its units needs when streamed.
        units: how many of its units would pass through a slot.
    """

    nbytes: int
    kv_cache: int = 0
    slab: int = 0
    units: int = 1


@dataclass(frozen=True)
class Room:
    """What is known about the devices.

    Attributes:
        budgets: bytes by device key, in the order to be filled; `"disk"` missing means unlimited.
        activations: bytes of activations to keep free on each device that runs something.
        slots: how many slots streaming needs when more than one unit is streamed.
        main_device: where streamed units run; None: the first accelerator with a budget.
    """

    budgets: Mapping[Key, int]
    activations: int = 0
    slots: int = 2
    main_device: Key | None = None

    @property
    def accelerators(self) -> list[Key]:
        """Keys of the accelerators with a budget, in order."""
        return [key for key, size in self.budgets.items() if size > 0 and is_accelerator(key)]

    @property
    def main(self) -> Key:
        """Where streamed units run."""
        if self.main_device is not None:
            return self.main_device
        return self.accelerators[0] if self.accelerators else HOST


@dataclass(frozen=True)
class Placement:
    """Where each item is held and where it runs.

    Attributes:
        held: device key of each item.
        runs: device key of each item; differs from `held` for what is streamed or viewed on disk.
        main: where streamed items run.
        slots: how many slots are reserved on `main`.
        slot_bytes: bytes of one slot.
    """

    held: tuple[Key, ...]
    runs: tuple[Key, ...]
    main: Key
    slots: int = 0
    slot_bytes: int = 0


def place_greedily(items: Sequence[Item], room: Room) -> Placement | None:
    """Return the greedy placement, or None if the items cannot be placed under the budgets."""
    best: Placement | None = None
    for cap, slots in _slot_choices(items, room):
        placement = _with_slots(items, room, cap, slots)
        if placement is not None and (best is None or _score(items, placement) > _score(items, best)):
            best = placement
    return best or _on_host(items, room)


def _score(items: Sequence[Item], placement: Placement) -> tuple[int, int]:
    """More is better: bytes that run on accelerators, then bytes resident there."""
    on = [is_accelerator(key) for key in placement.runs], [is_accelerator(key) for key in placement.held]
    runs, held = (sum(item.nbytes for item, there in zip(items, flags, strict=True) if there) for flags in on)
    return runs, held


def _slot_choices(items: Sequence[Item], room: Room) -> Iterator[tuple[int, int]]:
    """Yield (bytes of a slot, slots): nothing streamed first, then ever larger slots."""
    if not room.accelerators:
        return
    yield 0, 0
    for slab in sorted({item.slab for item in items if item.slab}):
        for slots in range(1, room.slots + 1):
            yield slab, slots


def _with_slots(items: Sequence[Item], room: Room, slab: int, slots: int) -> Placement | None:
    """Place with `slots` slots of `slab` bytes set aside on the main device; None if that cannot be."""
    streamable = [item.slab <= slab and slots > 0 for item in items]
    streamed_kv = 0
    while True:
        bins = _accelerator_bins(room, slots * slab + streamed_kv)
        if bins is None:
            return None
        left: list[int] = []
        for turn in (False, True):  # what cannot be streamed is placed first
            costs = [(i, it.nbytes + it.kv_cache) for i, it in enumerate(items) if streamable[i] is turn]
            left += fill_in_order(costs, bins)
        streamed = [index for index in left if streamable[index]]
        needed = sum(items[index].kv_cache for index in streamed)
        if needed <= streamed_kv:
            break
        streamed_kv = needed
    if sum(items[index].units for index in streamed) > 1 and slots < room.slots:
        return None
    placed = {index: bin_.device for bin_ in bins for index in bin_.placed}
    runs = {**placed, **{i: room.main if streamable[i] else HOST for i in left}}
    return _hold_the_rest(items, room, placed, runs, (slots, slab) if streamed else (0, 0))


def _accelerator_bins(room: Room, reserve: int) -> list[Bin] | None:
    bins = []
    for key in room.accelerators:
        free = room.budgets[key] - room.activations - (reserve if key == room.main else 0)
        if free < 0 and key == room.main:
            return None
        bins.append(Bin(key, max(free, 0)))
    return bins


def _on_host(items: Sequence[Item], room: Room) -> Placement | None:
    """Leave the accelerators out: everything runs on the CPU."""
    return _hold_the_rest(items, room, {}, dict.fromkeys(range(len(items)), HOST), (0, 0))


def _hold_the_rest(
    items: Sequence[Item],
    room: Room,
    placed: Mapping[int, Key],
    runs: Mapping[int, Key],
    slots: tuple[int, int],
) -> Placement | None:
    """Give what is on no accelerator a place in RAM, else on disk."""
    host_runs = [index for index, key in runs.items() if key == HOST]
    working = sum(items[i].kv_cache for i in host_runs) + (room.activations if host_runs else 0)
    free = room.budgets.get(HOST, 0) - working
    if host_runs and free < 0 and (HOST in room.budgets or working):
        return None
    bins = [Bin(HOST, max(free, 0)), Bin(DISK, room.budgets.get(DISK))]
    rest = [(i, item.nbytes) for i, item in enumerate(items) if i not in placed]
    if fill_in_order(rest, bins):
        return None
    held = {**placed, **{index: bin_.device for bin_ in bins for index in bin_.placed}}
    order = range(len(items))
    main = room.main if any(is_accelerator(key) for key in runs.values()) else HOST
    return Placement(tuple(held[i] for i in order), tuple(runs[i] for i in order), main, *slots)
