"""Huge pages for the memory of virtual accelerators: giving it back takes no time, as on a device.

A device's driver maps its memory in pages of megabytes. Host memory is mapped in pages of 4 KiB, and to unmap a GiB of
these holds the interpreter for a fifteenth of a second: what is measured of programs that let go of models would be the
stand-in's.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

PAGE_BYTES = 2 << 20
"""Bytes of a huge page."""

LEAST_BYTES = 32 << 20
"""Bytes from which malloc maps each block by itself: the pages of smaller ones may be used again by others."""


def use_huge_pages(address: int, nbytes: int) -> None:
    """Ask the system to map a block that was allocated just now in huge pages, where it is large and that is possible.

    Args:
        address: Where the block begins.
        nbytes: Its bytes.
    """
    if nbytes < LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = -(-address // PAGE_BYTES) * PAGE_BYTES
    end = (address + nbytes) // PAGE_BYTES * PAGE_BYTES
    _madvise()(begin, end - begin, mmap.MADV_HUGEPAGE)  # a system without huge pages refuses: nothing changes then


@cache
def _madvise() -> Any:
    """Return madvise(2)."""
    function: Any = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
