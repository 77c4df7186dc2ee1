"""What the kernel knows of mapped files: whether bytes are in memory, and whether any had to be read again."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys

import psutil

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def is_cached(address: int, nbytes: int) -> bool:
    """Whether all pages of a mapping, from the one at `address` on, are in memory.

    Where the kernel does not tell (not Linux; a file that this process could not write to) the answer is True: such
    bytes are then read through the cache, which is right in either case.
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
