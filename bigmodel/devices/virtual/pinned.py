"""Pinned host memory for virtual accelerators, rounded up as PyTorch's allocator does it, or CUDA if registered.

PyTorch's own pinned memory belongs to the machine's accelerator, so it does not know of it.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from ..forks import new_rlock

PAGE = 4096


class _Pinned(weakref.ref[Any]):
    """Refers to the memory of one tensor that is pinned.

    Attributes:
        begin: Its first address.
        nbytes: Bytes that the tensor asked for.
        reserved: Bytes that were pinned for it.
    """

    begin: int
    nbytes: int
    reserved: int


class PinnedMemory:
    """The pinned memory of this process.

    An interrupt at any moment loses no count: memory that is gone is queued without running Python code, and what is
    counted is what one dictionary holds.
    """

    def __init__(self) -> None:
        self._lock = new_rlock()
        self._alive: dict[int, _Pinned] = {}
        self._begins: list[int] = []
        self._gone: deque[weakref.ref[Any]] = deque()

    @property
    def requested(self) -> int:
        """Bytes of the tensors that are alive."""
        with self._lock:
            self._forget_gone()
            return sum(each.nbytes for each in self._alive.values())

    @property
    def reserved(self) -> int:
        """Bytes that were pinned for them."""
        with self._lock:
            self._forget_gone()
            return sum(each.reserved for each in self._alive.values())

    def empty(self, nbytes: int, rounded: bool = True) -> torch.Tensor:
        """Return a new pinned tensor of `nbytes` uint8, aligned to pages.

        It takes a power of two if `rounded`, as PyTorch's allocator of pinned memory does it; else whole pages, as
        memory that is registered with CUDA.
        """
        memory = np.empty(max(nbytes, 1) + PAGE, dtype=np.uint8)
        whole = torch.from_numpy(memory)
        with self._lock:
            self._forget_gone()
            pinned = _Pinned(memory, self._gone.append)
            pinned.begin, pinned.nbytes = whole.data_ptr() + -whole.data_ptr() % PAGE, nbytes
            pinned.reserved = pinned_bytes(nbytes) if rounded else -(-nbytes // PAGE) * PAGE
            self._begins = []  # invalid until it is rebuilt
            self._alive[pinned.begin] = pinned
            self._begins = sorted(self._alive)
        return whole[pinned.begin - whole.data_ptr() :][:nbytes]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in pinned memory."""
        if not self._alive:
            return False
        address = tensor.data_ptr()
        with self._lock:
            self._forget_gone()
            index = bisect.bisect_right(self._begins, address) - 1
            if index < 0:
                return False
            pinned = self._alive[self._begins[index]]
            return address < pinned.begin + pinned.nbytes

    def _forget_gone(self) -> None:
        """Forget memory that is gone; an interrupted call is made up for by the next one."""
        if len(self._begins) == len(self._alive) and not self._gone:
            return
        self._begins = []
        while self._gone:
            pinned = self._gone[0]
            if isinstance(pinned, _Pinned) and self._alive.get(getattr(pinned, "begin", 0)) is pinned:
                del self._alive[pinned.begin]
            self._gone.popleft()
        self._begins = sorted(self._alive)


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes that PyTorch pins for a tensor of `nbytes`: the next power of two.

    Its cache of pinned memory keeps them when the tensor is freed, for others of the same rounded size.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


pinned_memory = PinnedMemory()
