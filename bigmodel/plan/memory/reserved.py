"""`ReservedMemory`: the bytes that a caching allocator reserves for the tensors of a plan.

They depend on the order in which tensors come and go. So the events of the traces are replayed through a model of the
allocator, `CachingAllocator`, which also gives out the memory of virtual accelerators: weights and slots first, then
prompt and steps, between which the KV cache grows. The allocator is limited to the device's budget: there it gives back
what it has cached before it reserves more, as it does on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from ...devices.virtual.allocator import CachingAllocator, MemoryBlock, NoRoom, rounded
from ...profile import Profile
from ...profile.trace.ledger import Rounding, replay
from ...profile.trace.trace import InitialStorage
from ..result.budgets import Key

GROWTHS = 8
"""Lengths of the KV cache between prompt and full context at which its growth is replayed."""


def block_bytes(nbytes: int) -> int:
    """Return the bytes of the block that a caching allocator gives a tensor of `nbytes`: none for an empty one."""
    return rounded(nbytes) if nbytes else 0


class ReplayOptions(TypedDict):
    """Devices and rounding under which a trace is replayed: arguments of `Profile.dynamic_peaks`."""

    execution_devices: Mapping[int, Key]
    main: Key
    rounding: Mapping[Key, Rounding]
    input_device: Key
    experts: Mapping[tuple[int, int], int]
    offloaded: Mapping[int, Key]
    split: tuple[int, Key] | None


class _Allocator(CachingAllocator):
    """An allocator that notes whether it was at its capacity and gave cached memory back."""

    gave_back = False

    def empty_cache(self) -> None:
        self.gave_back = True
        super().empty_cache()


class ReservedMemory:
    """The memory of one device in a replay.

    Args:
        limit: bytes that the allocator may reserve; None: as many as it likes. If tensors need more, it reserves more.

    Attributes:
        peak: the most bytes that were reserved.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.peak = 0
        self._allocator = _Allocator(limit)
        self._by_storage: dict[int, MemoryBlock] = {}
        self._by_size: dict[int, list[MemoryBlock]] = {}

    @property
    def limited(self) -> bool:
        """Whether the limit made the allocator give cached memory back."""
        return self._allocator.gave_back

    def take(self, nbytes: int) -> MemoryBlock:
        """Take `nbytes` that `change` does not give back."""
        try:
            block = self._allocator.allocate(nbytes)
        except NoRoom:
            block = self._allocator.allocate(nbytes, beyond=True)
        self.peak = max(self.peak, self._allocator.reserved.now)
        return block

    def change(self, nbytes: int, storage: int | None = None) -> None:
        """Take `nbytes` for a tensor, or give them back (negative).

        Args:
            nbytes: its bytes.
            storage: its number; None: of the tensors of its size, it is given back before those taken before it.
        """
        if nbytes < 0:
            block = self._pop(-nbytes, storage)
            if block is not None:
                self._allocator.free(block)
        elif storage is None or storage in self._by_storage:
            self._by_size.setdefault(nbytes, []).append(self.take(nbytes))
        else:
            self._by_storage[storage] = self.take(nbytes)

    def begin(self, initial: Sequence[InitialStorage]) -> None:
        """Replace what a trace has left alive by what the next begins with: tensors of a KV cache grow one by one."""
        left = [*self._by_storage.values(), *(block for blocks in self._by_size.values() for block in blocks)]
        self._by_storage, self._by_size = {}, {}
        if len(left) == len(initial):
            for turn in range(1, GROWTHS):
                for at, (block, held) in enumerate(zip(left, initial, strict=True)):
                    grown = block.requested + (held.nbytes - block.requested) * turn // GROWTHS
                    left[at] = self.take(max(grown, 1))
                    self._allocator.free(block)
        for at, held in enumerate(initial):
            if held.nbytes:
                self._by_storage[held.storage] = self.take(held.nbytes)
            if at < len(left):
                self._allocator.free(left[at])
        for block in left[len(initial) :]:
            self._allocator.free(block)

    def _pop(self, nbytes: int, storage: int | None) -> MemoryBlock | None:
        if storage is not None and storage in self._by_storage:
            return self._by_storage.pop(storage)
        blocks = self._by_size.get(nbytes)
        return blocks.pop() if blocks else None


def replay_reserved(profile: Profile, memories: Mapping[Key, ReservedMemory], options: ReplayOptions) -> None:
    """Replay all phases of a profile in the memories of devices with caching allocators."""

    def watch(device: Key, nbytes: int, storage: int | None) -> None:
        if device in memories:
            memories[device].change(nbytes, storage)

    main = options["main"]
    for phase in profile.phases:
        inputs = main if phase.name == "forward" else options["input_device"]
        for trace in (*phase.also, phase.trace_on(main)):
            for device, memory in memories.items():
                units = options["execution_devices"]
                memory.begin([held for held in trace.initial if units.get(held.unit, main) == device])
            where = options.copy()
            where["input_device"] = inputs
            replay(trace, **where, watch=watch)
