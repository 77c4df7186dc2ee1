"""Gives the memory of virtual accelerators back to the host beside the program.

A device frees its memory in microseconds. The kernel takes 80 ms to free a GB of the host's, which stands in for it,
and Python's lock would be held for as long. So a thread gives the pages back, without the lock.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import os
import sys
from collections import deque

import torch

LEAST_BYTES = 4 * 2**20
"""Smaller memory is freed at once: that takes less than handing it over."""

_MADV_DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class GivingBack:
    """Storages that no tensor of a device uses any more, and the thread that gives their pages back.

    It is called while garbage is collected, at any moment: it takes no lock, and its thread lives as long as there is
    anything to give back. A forked child starts its own.
    """

    def __init__(self) -> None:
        self._waiting: deque[torch.UntypedStorage] = deque()
        self._worker = 0
        """The process whose thread is at work; 0: none is."""

    @property
    def done(self) -> bool:
        """Whether nothing waits, and no thread is at work."""
        return not self._waiting and self._worker != os.getpid()

    def take(self, storage: torch.UntypedStorage) -> None:
        """Take over a storage: its pages are given back soon, unless somebody else holds it."""
        self._waiting.append(storage)
        if self._worker != os.getpid():
            self._worker = os.getpid()
            try:
                _thread.start_new_thread(self._give_back, ())
            except RuntimeError:  # no more threads
                self._give_back()

    def _give_back(self) -> None:
        while True:
            while self._waiting:
                try:
                    storage = self._waiting.popleft()
                except IndexError:  # another thread was faster
                    break
                _release(storage)
                del storage
            self._worker = 0
            if not self._waiting:  # what came before that has not started a thread
                return
            self._worker = os.getpid()


def _release(storage: torch.UntypedStorage) -> None:
    """Release the pages of a storage that the caller alone holds and PyTorch has allocated: no other can be resized."""
    users: int = torch._C._storage_Use_Count(storage._cdata)
    if users > 1 or not storage.resizable() or storage.is_shared() or _libc is None:
        return
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        _libc.madvise(begin, end - begin, _MADV_DONTNEED)  # ctypes gives up Python's lock meanwhile


giving_back = GivingBack()
"""That of this process."""
