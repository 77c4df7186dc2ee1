"""What placing works with: items to be placed, room for them, and the placement that comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...devices import HOST
from ...limits import DEFAULT_SLOTS
from ..result.budgets import Key, is_accelerator


@dataclass(frozen=True)
class Item:
    """What placing one group of units takes.

    Attributes:
        weights: bytes that lie where the group is held.
        offloaded: the same where it is streamed from: fewer if it is quantised on its way; None if not.
        working: bytes of KV cache (and buffers) that lie where the group runs.
        slab: bytes of the largest slot any of its units needs when streamed; 0 if none is streamed.
        streams: how many of its units pass through a slot when streamed.
        pinned: it must be resident on the main device wherever there is one.
    """

    weights: int
    working: int = 0
    slab: int = 0
    streams: int = 1
    pinned: bool = False
    offloaded: int | None = None

    def held_bytes(self, streams: bool) -> int:
        """Return the bytes that lie off the accelerators, for a group that is streamed to one or not."""
        return self.offloaded if streams and self.offloaded is not None else self.weights

    @property
    def nbytes(self) -> int:
        """Bytes it takes where it is both held and run."""
        return self.weights + self.working


@dataclass(frozen=True)
class Room:
    """What is known about the devices.

    Attributes:
        budgets: bytes by device key, in the order to be filled; `"disk"` missing means unlimited.
        activations: bytes of activations to keep free on each device that runs something.
        slots: how many slots streaming needs when more than one unit is streamed.
        main_device: where streamed units run; None: the first accelerator with a budget.
        host_compute: units may run on the CPU although accelerators run others.
        expert_cache: bytes of each device for experts that are fetched one by one; None: what whole units would take.
    """

    budgets: Mapping[Key, int]
    activations: int = 0
    slots: int = DEFAULT_SLOTS
    main_device: Key | None = None
    host_compute: bool = False
    expert_cache: int | None = None

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
        main: where inputs are, and where streamed items run.
        slots: how many slots are reserved on `main`.
        slot_bytes: bytes of one slot.
    """

    held: tuple[Key, ...]
    runs: tuple[Key, ...]
    main: Key
    slots: int = 0
    slot_bytes: int = 0
