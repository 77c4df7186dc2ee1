"""The page cache: which mapped pages are in memory, and whether reads of weights use it or bypass it."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import threading
import time
import weakref
from enum import Enum, auto
from math import inf

import psutil

from ...devices import HOST, free_memory_bytes
from ...devices.forks import new_rlock
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
    return _statm(1) if os.path.exists(_STATM) else psutil.Process().memory_info().rss


def resident_file_bytes() -> int:
    """Return the bytes of mapped files in this process's resident set, libraries included; 0 where the kernel does not
    tell (not Linux)."""
    return _statm(2) if os.path.exists(_STATM) else 0


def _statm(column: int) -> int:
    with open(_STATM, "rb") as file:
        return int(file.read().split()[column]) * mmap.PAGESIZE


_STATM = "/proc/self/statm"


def page_cache_bytes(used: int) -> int:
    """Return the bytes of files that the page cache has memory for, so that they stay there while they are read
    repeatedly.

    Args:
        used: Bytes of other mapped files that this process uses. Free memory counts them as free.
    """
    return max(int(RESIDENT_SHARE * free_memory_bytes(HOST)) - used, 0)


class ReadMode(Enum):
    """How a read uses the page cache."""

    KEEP = auto()
    """Through the cache, which keeps the bytes."""

    PASS = auto()
    """Through the cache, from which the bytes are evicted once they are copied."""

    DIRECT = auto()
    """Directly from disk."""


class ReadPolicy:
    """Decides for each read how it uses the page cache.

    Cached bytes are read from the cache. Others are read through it if all that is read repeatedly fits into memory, so
    that the next pass finds them there. Otherwise the same share of the reads, as many as fit, does so in every pass,
    and the others leave nothing in the cache, directly or by eviction, whichever was measured to be faster: cyclic
    access to more than the capacity of an LRU cache has no hits.

    The policies of one process share its free memory.

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
        self._share = inf
        self._checked = float("-inf")
        with _policies_lock:
            _policies.add(self)

    def mode(self, cached: bool, offset: int) -> ReadMode:
        """Return how the next read should use the cache.

        Args:
            cached: Whether its bytes are cached.
            offset: Its offset in its file, in bytes.
        """
        if cached or spread(offset) < self._kept_share():
            return ReadMode.KEEP
        with self._lock:
            self._cold += 1
            direct, buffered = self._pace[True], self._pace[False]
            preferred = not buffered or direct >= buffered
            is_direct = preferred if self._cold % self.RETRY else not preferred
        return ReadMode.DIRECT if is_direct else ReadMode.PASS

    def record(self, bypassed: bool, nbytes: int, seconds: float) -> None:
        """Record how long a cold read of `nbytes` took."""
        pace = nbytes / max(seconds, 1e-9)
        with self._lock:
            known = self._pace[bypassed]
            self._pace[bypassed] = pace if not known else 0.8 * known + 0.2 * pace

    def all_fits(self) -> bool:
        """Whether what is read repeatedly stays in free memory, so that reads and writes use the page cache."""
        return self._kept_share() > 1

    def _kept_share(self) -> float:
        """Return the share of all reads whose bytes the page cache has memory for: above 1, for all."""
        now = time.monotonic()
        if now - self._checked > 1.0:
            self._checked = now
            with _policies_lock:
                repeated = sum(policy.nbytes for policy in _policies)
            self._share = page_cache_bytes(resident_file_bytes()) / repeated if repeated else inf
        return self._share


_policies: weakref.WeakSet[ReadPolicy] = weakref.WeakSet()
_policies_lock = new_rlock()


def spread(offset: int) -> float:
    """Return a number from 0 to 1 for the page at a byte offset: those of any reads are spread evenly (the fractional
    parts of multiples of the golden ratio, Weyl 1916)."""
    return offset // mmap.PAGESIZE * _GOLDEN % 1.0


_GOLDEN = (5**0.5 - 1) / 2
