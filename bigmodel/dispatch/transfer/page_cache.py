"""The page cache: which mapped pages are in memory, and whether reads of weights use it or bypass it."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from ...devices import HOST, free_memory_bytes
from ...limits import RESIDENT_SHARE

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def is_cached(address: int, nbytes: int) -> bool:
    """Whether all pages of a mapping, from the one at `address` on, are in memory.

    Where the kernel does not tell (not Linux; a file without write permission) the answer is True: the bytes are then
    read through the cache, which is correct in either case.
    """
    if _libc is None:
        return True
    start = address - address % mmap.PAGESIZE
    pages = -(-(address + nbytes - start) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    if _libc.mincore(start, pages * mmap.PAGESIZE, found):
        return True
    # Only the lowest bit of each byte is defined.
    return all(byte & 1 for byte in set(bytes(found)))


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
    """Decides for each read whether it bypasses the page cache, and how many cold reads run at once.

    Cached bytes are read from the cache. Others are read through it if all blocks fit into memory, so that the next
    pass finds them there. Otherwise they would be evicted before the next pass (cyclic access to more than the capacity
    of an LRU cache has no hits), and the read uses the mode, buffered or direct, that was measured to be faster.

    Several readers keep a disk busy while compute takes the core of one; some disks are slower with several than with
    one, which reads a file in order. As many run at once, one or all, as were measured to be faster.

    Args:
        nbytes: Bytes that are read repeatedly.
        readers: Number of threads that read.
    """

    RETRY = 32
    """Every 32nd cold read uses the slower mode, to measure it again."""

    TURN = 8
    """Cold reads after which the number at once may change."""

    TURNS = 64
    """Every 64th turn has the slower number at once, to measure it again."""

    def __init__(self, nbytes: int, readers: int = 1) -> None:
        self.nbytes = nbytes
        self._numbers = (readers, 1) if readers > 1 else (1,)
        self._changed = threading.Condition()
        self._running = 0
        self._pace: dict[tuple[bool, int], float] = {}
        self._cold = 0
        self._fits = True
        self._checked = float("-inf")

    @property
    def at_once(self) -> int:
        """How many cold reads may run at once now."""
        turn = self._cold // self.TURN
        if turn < len(self._numbers):
            return self._numbers[turn]
        preferred = max(self._numbers, key=lambda number: max(self._pace_of(mode, number) for mode in (True, False)))
        return preferred if turn % self.TURNS else min(self._numbers, key=lambda number: number == preferred)

    def bypasses(self, cached: bool) -> bool:
        """Whether the next read should bypass the cache, given whether its bytes are cached."""
        if cached or self._all_fits():
            return False
        number = self.at_once
        direct, buffered = self._pace_of(True, number), self._pace_of(False, number)
        preferred = not buffered or direct >= buffered
        return preferred if (self._cold + 1) % self.RETRY else not preferred

    @contextmanager
    def cold_read(self, nbytes: int, bypassed: bool) -> Iterator[None]:
        """Wait until one more cold read may run; within this context it runs, and is timed."""
        with self._changed:
            while self._running >= self.at_once:
                self._changed.wait()
            self._running += 1
            number, before = self.at_once, self._running
        started = time.perf_counter()
        try:
            yield
            seconds = time.perf_counter() - started
            with self._changed:
                self.record(bypassed, nbytes, seconds, number, (before + self._running) / 2)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def record(self, bypassed: bool, nbytes: int, seconds: float, number: int = 1, running: float = 1.0) -> None:
        """Record a cold read.

        Args:
            bypassed: Whether it bypassed the cache.
            nbytes: Its bytes.
            seconds: How long it took.
            number: How many were allowed at once when it began.
            running: How many ran at once, itself among them, in the mean.
        """
        pace = running * nbytes / max(seconds, 1e-9)
        known = self._pace_of(bypassed, number)
        self._pace[bypassed, number] = pace if not known else 0.8 * known + 0.2 * pace
        self._cold += 1

    def _pace_of(self, bypassed: bool, number: int) -> float:
        return self._pace.get((bypassed, number), 0.0)

    def _all_fits(self) -> bool:
        now = time.monotonic()
        if now - self._checked > 1.0:
            self._checked = now
            self._fits = self.nbytes < RESIDENT_SHARE * free_memory_bytes(HOST)
        return self._fits
