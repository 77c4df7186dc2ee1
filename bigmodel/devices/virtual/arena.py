"""The memory of one virtual accelerator: its capacity, allocated bytes and their peak."""

from __future__ import annotations

import ctypes
import weakref
from functools import partial
from typing import NamedTuple

import torch

from ..sizes import format_size
from .allocator import Block, CachingAllocator, ExactAllocator, NoRoom
from .postponing import postponed
from .races import History, detector
from .streams import current_stream

POISON = 0xFF
"""The byte that freed memory of strict accelerators holds for whoever still reads it: floats are NaN, integers -1."""


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


class Arena:
    """Counted memory with a capacity, shared by all tensors of one virtual accelerator.

    Args:
        index: Index of the virtual accelerator.
        capacity: Bytes that may be allocated at once; None for no limit.
        caching: How its allocator caches; None: bytes are counted as they are asked for.

    Attributes:
        strict: Whether accesses to its memory are checked for their order.
        memory: Counts its bytes.
        workspace: Bytes that matrix products allocate once for each stream.
        is_caching: Whether memory is given out by a caching allocator.
    """

    def __init__(self, index: int, capacity: int | None = None, caching: Caching | None = None) -> None:
        self.index = index
        self.strict = False
        self.is_caching = caching is not None
        self.workspace = 0 if caching is None else caching.workspace
        self.memory: ExactAllocator | CachingAllocator = (
            ExactAllocator(capacity) if caching is None else CachingAllocator(capacity, caching.context)
        )
        self._workspaces: dict[int, Block] = {}
        self._lock = detector.lock  # freeing memory, at any time, locks both
        self._by_address: dict[int, weakref.ref[Allocation]] = {}

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
            known = self._by_address.get(address)
            allocation = known() if known is not None else None
            if allocation is not None:
                return allocation
            stream = current_stream(self.index)
            block = self._allocate(nbytes, stream.number)
            history = detector.allocated(nbytes, stream) if self.strict else None
            allocation = Allocation(nbytes, history)
            # What is freed is poisoned, if the device is strict: the storage outlives the tensors until then.
            freed = partial(self._release, address, block, history, storage if self.strict else None)
            self._by_address[address] = weakref.ref(allocation, freed)
            return allocation

    def need_workspace(self) -> None:
        """Allocate the workspace of matrix products on the current stream, unless it has one."""
        with self._lock:
            number = current_stream(self.index).number
            if self.workspace and number not in self._workspaces:
                self._workspaces[number] = self._allocate(self.workspace, number)

    def reset_peak(self) -> None:
        """Reset all peaks to what is in use now."""
        with self._lock:
            self.memory.reset_peaks()

    def empty_cache(self) -> None:
        """Give back what is cached."""
        with self._lock:
            self.memory.empty_cache()

    def _allocate(self, nbytes: int, stream: int) -> Block:
        memory = self.memory
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

    def _release(
        self,
        address: int,
        block: Block,
        history: History | None,
        storage: torch.UntypedStorage | None,
        reference: weakref.ref[Allocation],
    ) -> None:
        if storage is not None and _is_read_still(storage, address):
            ctypes.memset(address, POISON, storage.nbytes())
        with self._lock:
            if history is not None:
                detector.freed(history)
            users = () if history is None else history.users.values()
            self.memory.free(block, [user.record_event().query for user in users])
            if self._by_address.get(address) is reference:
                del self._by_address[address]


def _is_read_still(storage: torch.UntypedStorage, address: int) -> bool:
    """Whether somebody beside its arena holds a storage that is freed, which lies where it lay when it was claimed."""
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users > 1 and storage.data_ptr() == address
