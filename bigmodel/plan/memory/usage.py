"""`MemoryUsage`: the bytes that a placement takes on each device, by purpose.

The search, the exact evaluation, the plan of a training and the report all count with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ...devices import DISK, HOST
from ...limits import STAGING_BYTES
from ..result.budgets import Key
from ..result.plan import DevicePlan
from .slots import read_ahead_window, staging

WEIGHTS, BUFFERS, KV_CACHE, ACTIVATIONS = "weights", "buffers", "kv_cache", "activations"
SLOTS, TRAINING = "slots", "training"
"""What bytes are for: the fields of `DevicePlan`."""


class MemoryUsage:
    """Bytes of each device by purpose. Everything that is added can be removed again, in any order.

    Slots, the read-ahead window and staging depend on all blocks together, so blocks are added and their bytes computed
    from those present.

    Args:
        main: the device with the slots.
        slots: how many slots there are at most.
        staging_bytes: bytes of the host through which blocks on disk reach an accelerator, at most.
    """

    def __init__(self, main: Key, slots: int = 0, staging_bytes: int = STAGING_BYTES) -> None:
        self.main = main
        self._most_slots = slots
        self._most_staging = staging_bytes
        self._bytes: dict[Key, dict[str, int]] = {}
        self._streamed: Counter[int] = Counter()
        self._turns = 0
        self._viewed: Counter[int] = Counter()
        self._staged: Counter[int] = Counter()

    def add(self, device: Key, purpose: str, nbytes: int) -> None:
        """Add bytes of one purpose to a device; a negative number removes them."""
        purposes = self._bytes.setdefault(device, {})
        purposes[purpose] = purposes.get(purpose, 0) + nbytes

    def add_streamed(self, slot_bytes: int, blocks: int = 1) -> None:
        """Add blocks that take turns in the slots, the largest of them in a slot of `slot_bytes`."""
        self._streamed[slot_bytes] += 1
        self._turns += blocks

    def remove_streamed(self, slot_bytes: int, blocks: int = 1) -> None:
        """Remove blocks that `add_streamed` added."""
        _remove(self._streamed, slot_bytes)
        self._turns -= blocks

    def add_viewed(self, nbytes: int) -> None:
        """Add a block on disk that the host computes with, read through the read-ahead window."""
        self._viewed[nbytes] += 1

    def remove_viewed(self, nbytes: int) -> None:
        """Remove a block that `add_viewed` added."""
        _remove(self._viewed, nbytes)

    def add_staged(self, nbytes: int) -> None:
        """Add a block that is copied from disk to an accelerator by way of the host's memory."""
        self._staged[nbytes] += 1

    def remove_staged(self, nbytes: int) -> None:
        """Remove a block that `add_staged` added."""
        _remove(self._staged, nbytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: of the largest streamed block."""
        return max(self._streamed, default=0)

    @property
    def slots(self) -> int:
        """How many slots the streamed blocks need."""
        return min(self._turns, self._most_slots)

    @property
    def devices(self) -> list[Key]:
        """Devices that take any bytes, in the order these were added."""
        passing = [HOST] if self._viewed or self._staged else []
        return list(dict.fromkeys([*self._bytes, *passing]))

    def of(self, device: Key, purpose: str) -> int:
        """Return the bytes of a device for one purpose."""
        nbytes = self._bytes.get(device, {}).get(purpose, 0)
        return nbytes + self._passing(device) if purpose == SLOTS else nbytes

    def total(self, device: Key) -> int:
        """Return the bytes of a device for all purposes."""
        return sum(self._bytes.get(device, {}).values()) + self._passing(device)

    def device_plans(self) -> dict[Key, DevicePlan]:
        """Return the bytes of every device that takes any, without a budget."""
        purposes = (WEIGHTS, BUFFERS, KV_CACHE, ACTIVATIONS, SLOTS, TRAINING)
        return {
            device: DevicePlan(device, budget=None, **{purpose: self.of(device, purpose) for purpose in purposes})
            for device in self.devices
        }

    def over(self, budgets: Mapping[Key, int]) -> dict[Key, int]:
        """Return by how many bytes each device passes its budget.

        The disk has none unless it is given. A host without a budget holds nothing, but blocks pass through it.
        """
        found = {}
        for device in dict.fromkeys([*self._bytes, self.main, HOST]):
            total = self.total(device)
            budget = budgets.get(device, 0)
            if device == DISK and device not in budgets:
                continue
            if device == HOST and not budget:
                total -= self._passing(HOST)
            if total > budget:
                found[device] = total - budget
        return found

    def _passing(self, device: Key) -> int:
        """Return the bytes of a device through which blocks held elsewhere pass."""
        nbytes = self.slots * self.slot_bytes if device == self.main else 0
        if device == HOST and (self._viewed or self._staged):
            nbytes += read_ahead_window(list(self._viewed.elements())) + staging(
                list(self._staged.elements()), self._most_staging
            )
        return nbytes


def _remove(blocks: Counter[int], nbytes: int) -> None:
    blocks[nbytes] -= 1
    if not blocks[nbytes]:
        del blocks[nbytes]
