"""The page cache: which mapped pages are in memory, and whether weights are read through it or past it."""

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

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def is_cached(address: int, nbytes: int) -> bool:
    """Whether all pages of a mapping, from the one at `address` on, are in memory.

    Where the kernel does not say (not Linux; a file that this process could not write to) the answer is True: such
    bytes are then read through the cache, which is correct in either case.
    """
    if _libc is None:
        return True
    start = address - address % mmap.PAGESIZE
    pages = -(-(address + nbytes - start) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    if _libc.mincore(start, pages * mmap.PAGESIZE, found):
        return True
    # The lowest bit of each byte tells; the others are reserved.
    return all(byte & 1 for byte in set(bytes(found)))


def is_page_cached(address: int) -> bool:
    """Whether the page of a mapping that `address` lies on is in memory. Costs about a microsecond."""
    found = ctypes.c_ubyte()
    if _libc is None or _libc.mincore(address - address % mmap.PAGESIZE, mmap.PAGESIZE, ctypes.byref(found)):
        return True
    return bool(found.value & 1)


def major_faults() -> int:
    """Return how often this process has touched a page that had to be read from disk first."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def resident_bytes() -> int:
    """Return the bytes of this process's resident set."""
    if not os.path.exists("/proc/self/statm"):
        return psutil.Process().memory_info().rss
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class ReadPolicy:
    """Decides for each read whether it goes past the page cache.

    Bytes that are in the cache are read from there. Others are read through it if everything that will be read fits
    into memory, for then the next pass finds it there. If not, the cache would have thrown them out again by then (a
    cycle longer than an LRU cache never hits), and whichever way the disk has proved faster is taken.

    Args:
        nbytes: How many bytes are read again and again.
    """

    RETRY = 32
    """Every so many cold reads the way that is not preferred is tried again."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._pace = {True: 0.0, False: 0.0}
        self._cold = 0
        self._fits = True
        self._asked = float("-inf")

    def bypasses(self, cached: bool) -> bool:
        """Whether the next read should go past the cache, which holds its bytes or does not (`cached`)."""
        if cached or self._all_fits():
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

    def _all_fits(self) -> bool:
        now = time.monotonic()
        if now - self._asked > 1.0:
            self._asked = now
            self._fits = self.nbytes < 0.8 * free_memory_bytes(HOST)
        return self._fits
