"""The memory of one virtual accelerator: its capacity, allocated bytes and their peak."""

from __future__ import annotations

import weakref
from functools import partial

import torch

from ..forks import new_rlock
from ..sizes import format_size
from .postponing import postponed


class Allocation:
    """Keeps one storage counted in its arena for as long as any tensor refers to this object."""

    __slots__ = ("__weakref__", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Arena:
    """Counted memory with a capacity, shared by all tensors of one virtual accelerator.

    Args:
        index: Index of the virtual accelerator.
        capacity: Bytes that may be allocated at once; None for no limit.
    """

    def __init__(self, index: int, capacity: int | None = None) -> None:
        self.index = index
        self.capacity = capacity
        self.allocated = 0
        self.peak = 0
        self._lock = new_rlock()
        self._by_address: dict[int, weakref.ref[Allocation]] = {}

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
            self._reserve(nbytes)
            allocation = Allocation(nbytes)
            self._by_address[address] = weakref.ref(allocation, partial(self._release, address, nbytes))
            return allocation

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are allocated now."""
        with self._lock:
            self.peak = self.allocated

    def _reserve(self, nbytes: int) -> None:
        if self.capacity is None or self.allocated + nbytes <= self.capacity:
            self.allocated += nbytes
            self.peak = max(self.peak, self.allocated)
            return
        error = torch.OutOfMemoryError(
            f"virtual:{self.index} out of memory: tried to allocate {format_size(nbytes)}; "
            f"{format_size(self.allocated)} of {format_size(self.capacity)} is in use"
        )
        if not postponed(error):
            raise error
        self.allocated += nbytes

    def _release(self, address: int, nbytes: int, reference: weakref.ref[Allocation]) -> None:
        with self._lock:
            self.allocated -= nbytes
            if self._by_address.get(address) is reference:
                del self._by_address[address]
