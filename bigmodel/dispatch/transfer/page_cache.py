"""The page cache: which mapped pages are in memory, and whether reads of weights use it or bypass it."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import threading
import time

import psutil

from ...devices import HOST, free_memory_bytes
from ...limits import RESIDENT_SHARE

_libc = ctypes.PyDLL(None) if sys.platform == "linux" else None
"""C's functions, called without giving up the interpreter's lock: for one page they take a microsecond, getting the
lock back from other threads takes many."""
if _libc is not None:
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

SAMPLES = 16
"""Pages that stand for all of a chunk."""


def seems_cached(address: int, nbytes: int) -> bool:
    """Whether pages spread over a mapping, from the one at `address` to the last, are in memory: `SAMPLES` or all.

    Looking at each page takes half as long as copying it out of the page cache. Where the kernel does not tell (not
    Linux; a file without write permission) the answer is True: the bytes are then read through the cache, which is
    correct in either case.
    """
    pages = -(-(address % mmap.PAGESIZE + nbytes) // mmap.PAGESIZE)
    count = min(pages, SAMPLES)
    steps = max(count - 1, 1)
    return all(is_page_cached(address + (pages - 1) * step // steps * mmap.PAGESIZE) for step in range(count))


def is_page_cached(address: int) -> bool:
    """Whether the mapped page at `address` is in memory. Takes about a microsecond."""
    found = ctypes.c_ubyte()
    if _libc is None or _libc.mincore(address - address % mmap.PAGESIZE, mmap.PAGESIZE, ctypes.byref(found)):
        return True
    return bool(found.value & 1)


def major_faults() -> int:
    """Return the number of this process's major page faults: accesses to pages that had to be read from disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def resident_bytes() -> int:
    """Return the bytes of this process's resident set."""
    if not os.path.exists("/proc/self/statm"):
        return psutil.Process().memory_info().rss
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class ReadPolicy:
    """Decides for each read whether it bypasses the page cache.

    Cached bytes are read from the cache. Others are read through it if all blocks fit into memory, so that the next
    pass finds them there. Otherwise they would be evicted before the next pass (cyclic access to more than the capacity
    of an LRU cache has no hits), and the read uses the mode, buffered or direct, that was measured to be faster.

    Args:
        nbytes: Bytes that are read repeatedly.
    """

    RETRY = 32
    """Every 32nd cold read uses the slower mode, to measure it again."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._pace = {True: 0.0, False: 0.0}
        self._cold = 0
        self._fits = True
        self._checked = float("-inf")

    def bypasses(self, cached: bool) -> bool:
        """Whether the next read should bypass the cache, given whether its bytes are cached."""
        if cached or self.all_fits():
            return False
        with self._lock:
            self._cold += 1
            direct, buffered = self._pace[True], self._pace[False]
            preferred = not buffered or direct >= buffered
            return preferred if self._cold % self.RETRY else not preferred

    def record(self, bypassed: bool, nbytes: int, seconds: float) -> None:
        """Record how long a cold read of `nbytes` took."""
        pace = nbytes / max(seconds, 1e-9)
        with self._lock:
            known = self._pace[bypassed]
            self._pace[bypassed] = pace if not known else 0.8 * known + 0.2 * pace

    def all_fits(self) -> bool:
        """Whether what is read repeatedly stays in free memory, so that reads and writes use the page cache."""
        now = time.monotonic()
        if now - self._checked > 1.0:
            self._checked = now
            self._fits = self.nbytes < RESIDENT_SHARE * free_memory_bytes(HOST)
        return self._fits
