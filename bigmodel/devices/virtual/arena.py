"""The memory of one virtual accelerator: its capacity, allocated bytes and their peak."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..sizes import format_size
from .allocator import CachingAllocator, ExactAllocator, MemoryBlock, NoRoom
from .giving_back import LEAST_BYTES, giving_back
from .postponing import postponed
from .races import History, detector
from .streams import current_stream, is_compute_late

POISON = 0xFF
"""The byte that freed memory of strict accelerators holds, for reads after the free: floats are NaN, integers -1."""


class Caching(NamedTuple):
    """Memory that is given out by a caching allocator with PyTorch's rules for CUDA, instead of to the byte.

    Attributes:
        context: Bytes of the device that are never given to tensors: those of CUDA's context.
        workspace: Bytes that matrix products allocate once for each stream, as cuBLAS does.
    """

    context: int = 0
    workspace: int = 0


class Allocation:
    """Keeps one storage counted in its arena for as long as any tensor refers to this object.

    Attributes:
        nbytes: Its bytes.
        history: The accesses to it, on a strict accelerator.
    """

    __slots__ = ("__weakref__", "history", "nbytes")

    def __init__(self, nbytes: int, history: History | None) -> None:
        self.nbytes = nbytes
        self.history = history

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a tensor has other memory, which is counted by an allocation of its own."""


class _Entry(weakref.ref[Allocation]):
    """An allocation in the books of its arena: what is to be done when it is gone.

    Attributes:
        address: Where its storage lies.
        block: Its block in the device's memory.
        history: The accesses to it, on a strict accelerator.
        storage: The storage, to be poisoned if the accelerator is strict, and given back; None of a small one else.
        then: Frees it at once when it is gone.
    """

    __slots__ = ("address", "block", "history", "storage", "then")

    address: int
    block: MemoryBlock
    history: History | None
    storage: torch.UntypedStorage | None
    then: weakref.ref[Allocation]


class Arena:
    """Counted memory with a capacity, shared by all tensors of one virtual accelerator.

    An interrupt at any moment loses no count, as CUDA's allocator is not interrupted. What is in use stands in two
    dictionaries, which change in one step each; if one came between that and the allocator's own books, these are
    rebuilt from them. An allocation that ends is queued without running Python code, and freed right after it; or,
    if that is interrupted or the arena is at work in the same thread, before the next look at the books.

    Args:
        index: Index of the virtual accelerator.
        capacity: Bytes that may be allocated at once; None for no limit.
        caching: How its allocator caches; None: bytes are counted as they are asked for.

    Attributes:
        strict: Whether accesses to its memory are checked for their order.
        workspace: Bytes that matrix products allocate once for each stream.
        is_caching: Whether memory is given out by a caching allocator.
    """

    def __init__(self, index: int, capacity: int | None = None, caching: Caching | None = None) -> None:
        self.index = index
        self.strict = False
        self.is_caching = caching is not None
        self.workspace = 0 if caching is None else caching.workspace
        self._memory: ExactAllocator | CachingAllocator = (
            ExactAllocator(capacity) if caching is None else CachingAllocator(capacity, caching.context)
        )
        self._lock = detector.lock  # freeing memory, at any time, locks both
        self._by_address: dict[int, _Entry] = {}
        self._workspaces: dict[int, MemoryBlock] = {}
        self._ended: deque[weakref.ref[Allocation]] = deque()
        self._is_at_work = False
        self._is_torn = False

    @property
    def memory(self) -> ExactAllocator | CachingAllocator:
        """Counts its bytes."""
        if self._ended or self._is_torn:
            self._free_ended()
        return self._memory

    @property
    def capacity(self) -> int | None:
        """Bytes of the device; None for no limit."""
        return self.memory.capacity

    @capacity.setter
    def capacity(self, nbytes: int | None) -> None:
        self.memory.capacity = nbytes

    @property
    def allocated(self) -> int:
        """Bytes of tensors."""
        return self.memory.allocated.now

    @property
    def peak(self) -> int:
        """The most bytes of tensors since the last reset."""
        return self.memory.allocated.peak

    @peak.setter
    def peak(self, nbytes: int) -> None:
        self.memory.allocated.peak = nbytes

    def claim(self, held: torch.Tensor) -> Allocation | None:
        """Count the storage of `held` as allocated, or find the allocation that it has already.

        Returns:
            The allocation, to be referenced as long as the storage is in use; None for a storage of 0 bytes.

        Raises:
            torch.OutOfMemoryError: The storage would exceed the capacity. Within autograd's C++ code it is counted
                nevertheless, and the backward pass raises this at its end.
        """
        storage = held.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes == 0:
            return None
        address = storage.data_ptr()
        with self._lock:
            if self._ended or self._is_torn:
                self._free_ended()
            known = self._by_address.get(address)
            if known is not None:
                allocation = known()
                if allocation is not None:
                    return allocation
                self._free(known)  # it ends in another thread just now
            stream = current_stream(self.index)
            self._is_at_work = self._is_torn = True
            try:
                block = self._allocate(nbytes, stream.number)
                history = detector.allocated(nbytes, stream) if self.strict else None
                allocation = Allocation(nbytes, history)
                # The last reference is called first. It only queues, in C: nothing can interrupt that.
                then = weakref.ref(allocation, self._free_ended)
                entry = _Entry(allocation, self._ended.append)
                entry.address, entry.block, entry.history, entry.then = address, block, history, then
                # What is freed is poisoned, if the device is strict, or given back in a thread, if it is large: the
                # storage outlives the tensors until then.
                entry.storage = storage if self.strict or nbytes >= LEAST_BYTES else None
                self._by_address[address] = entry
                self._is_torn = False
            finally:
                self._is_at_work = False
            return allocation

    def need_workspace(self) -> None:
        """Allocate the workspace of matrix products on the current stream, unless it has one."""
        if not self.workspace:
            return
        with self._lock:
            number = current_stream(self.index).number
            if number not in self._workspaces:
                self._free_ended()
                self._is_at_work = self._is_torn = True
                try:
                    self._workspaces[number] = self._allocate(self.workspace, number)
                    self._is_torn = False
                finally:
                    self._is_at_work = False

    def reset_peak(self) -> None:
        """Reset all peaks to what is in use now."""
        with self._lock:
            self.memory.reset_peaks()

    def empty_cache(self) -> None:
        """Give back what is cached."""
        with self._lock:
            self._free_ended()
            self._is_at_work = self._is_torn = True
            try:
                self._memory.empty_cache()
                self._is_torn = False
            finally:
                self._is_at_work = False

    def _allocate(self, nbytes: int, stream: int) -> MemoryBlock:
        memory = self._memory
        try:
            return memory.allocate(nbytes, stream)
        except NoRoom:
            error = torch.OutOfMemoryError(
                f"virtual:{self.index} out of memory: tried to allocate {format_size(nbytes)}; "
                f"{format_size(memory.reserved.now + memory.context)} of {format_size(memory.capacity or 0)} is in use"
            )
        if not postponed(error):
            raise error
        return memory.allocate(nbytes, stream, beyond=True)

    def _free_ended(self, _: object = None) -> None:
        """Free allocations that have ended; before, rebuild the allocator's books if they are torn."""
        if not (self._ended or self._is_torn):
            return
        with self._lock:
            if self._is_at_work:  # a garbage collection has called this in the middle of it
                return
            self._is_at_work = True
            try:
                if self._is_torn:
                    self._memory.recount(
                        [*(entry.block for entry in self._by_address.values()), *self._workspaces.values()]
                    )
                    self._is_torn = False
                while self._ended:
                    self._free(self._ended[0])
                    self._ended.popleft()
            finally:
                self._is_at_work = False

    def _free(self, entry: weakref.ref[Allocation]) -> None:
        """Free an allocation that has ended, unless it is freed or was never entered."""
        if not isinstance(entry, _Entry) or self._by_address.get(getattr(entry, "address", 0)) is not entry:
            return
        history, storage = entry.history, entry.storage
        unfinished: list[Callable[[], bool]] = []
        if storage is not None and self.strict and _is_read_still(storage, entry.address):
            _poison(storage, entry.address, history)
        if history is not None:
            detector.freed(history)
            if history.users:
                unfinished = [user.record_event().has_passed for user in history.users.values()]
        self._is_torn = True
        del self._by_address[entry.address]
        self._memory.free(entry.block, unfinished)
        self._is_torn = False
        if storage is not None and not self.strict:
            entry.storage = None
            giving_back.take(storage)


def _poison(storage: torch.UntypedStorage, address: int, history: History | None) -> None:
    """Poison a storage that is freed; if computation is late, after work that was launched before and may use it.

    Mostly it is nobody's then, as that work alone has held it: what nobody can read is not poisoned.
    """

    def poison() -> None:
        if _is_read_still(storage, address):
            ctypes.memset(address, POISON, storage.nbytes())

    if history is None or not is_compute_late():
        poison()
    else:
        history.home.when_done(poison, [(user, user.position) for user in history.users.values()])


def _is_read_still(storage: torch.UntypedStorage, address: int) -> bool:
    """Whether somebody beside its arena holds a storage that is freed, which lies where it lay when it was claimed."""
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users > 1 and storage.data_ptr() == address
