"""Pinned host memory for virtual accelerators, rounded up as CUDA's host allocator does.

PyTorch's own pinned memory belongs to the machine's accelerator, so it does not know of it.
"""

from __future__ import annotations

import bisect
import weakref

import numpy as np
import torch

from ..forks import new_rlock

PAGE = 4096


class PinnedMemory:
    """The pinned memory of this process.

    Attributes:
        requested: Bytes of the tensors that are alive.
        reserved: Bytes that were pinned for them: each tensor takes a power of two.
    """

    def __init__(self) -> None:
        self.requested = 0
        self.reserved = 0
        self._lock = new_rlock()
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a new pinned tensor of `nbytes` uint8, aligned to pages."""
        memory = np.empty(max(nbytes, 1) + PAGE, dtype=np.uint8)
        whole = torch.from_numpy(memory)
        begin = whole.data_ptr() + -whole.data_ptr() % PAGE
        with self._lock:
            bisect.insort(self._begins, begin)
            self._ends[begin] = begin + nbytes
            self.requested += nbytes
            self.reserved += pinned_bytes(nbytes)
        weakref.finalize(memory, self._release, begin, nbytes).atexit = False
        return whole[begin - whole.data_ptr() :][:nbytes]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in pinned memory."""
        if not self._begins:
            return False
        address = tensor.data_ptr()
        with self._lock:
            index = bisect.bisect_right(self._begins, address) - 1
            return index >= 0 and address < self._ends[self._begins[index]]

    def _release(self, begin: int, nbytes: int) -> None:
        with self._lock:
            self._begins.remove(begin)
            del self._ends[begin]
            self.requested -= nbytes
            self.reserved -= pinned_bytes(nbytes)


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes that PyTorch pins for a tensor of `nbytes`: the next power of two.

    Its cache of pinned memory keeps them when the tensor is freed, for others of the same rounded size.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


pinned_memory = PinnedMemory()
