"""The memory of one virtual accelerator: its capacity, allocated bytes and their peak."""

from __future__ import annotations

import weakref
from functools import partial

import torch

from ..sizes import format_size
from .postponing import postponed
from .races import History, detector
from .streams import current_stream


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

    Attributes:
        strict: Whether accesses to its memory are checked for their order.
    """

    def __init__(self, index: int, capacity: int | None = None) -> None:
        self.index = index
        self.capacity = capacity
        self.strict = False
        self.allocated = 0
        self.peak = 0
        self._lock = detector.lock  # freeing memory, at any time, locks both
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
            history = detector.allocated(nbytes, current_stream(self.index)) if self.strict else None
            allocation = Allocation(nbytes, history)
            self._by_address[address] = weakref.ref(allocation, partial(self._release, address, nbytes, history))
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

    def _release(self, address: int, nbytes: int, history: History | None, reference: weakref.ref[Allocation]) -> None:
        with self._lock:
            if history is not None:
                detector.freed(history)
            self.allocated -= nbytes
            if self._by_address.get(address) is reference:
                del self._by_address[address]
