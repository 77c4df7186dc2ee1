"""Whether bytes of a mapped file are in memory already, asked of the kernel."""

from __future__ import annotations

import ctypes
import mmap
import sys

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
