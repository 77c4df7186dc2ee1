"""The kernel's page cache: evict files, read them in, and count cached bytes.

`posix_fadvise` silently keeps pages that any process has mapped. `evict` therefore counts the remaining pages with
`mincore`, and raises if more than a few are left.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BenchmarkError

if TYPE_CHECKING:
    import torch

_MAPS = Path("/proc/self/maps")
_MADV_DONTNEED = 4
_ATTEMPTS = 8
_TRACE = 0.001
"""Fraction of a file that may stay cached: a page or two that the kernel does not evict."""


def evict(files: Iterable[Path]) -> None:
    """Evict `files` from the page cache and verify that.

    This process's own maps of them are emptied first, since mapped pages are not evicted; they are read again on the
    next access. Modifications of private maps are lost, so this is only for weights that are not written.

    Args:
        files: Files without dirty pages, which cannot be evicted.

    Raises:
        BenchmarkError: Pages stayed, for example because another process has mapped them.
    """
    for file in files:
        left, total = _thrown_out(file), file.stat().st_size
        if left > _most_left(total):
            raise BenchmarkError(
                f"{left:,} of {total:,} bytes of {file.name} stayed in the page cache, so a cold read cannot be "
                "measured; another process may have it mapped"
            )


def _thrown_out(file: Path) -> int:
    """Evict `file`, repeatedly if the kernel is still reading ahead in it; return the bytes that stay."""
    for attempt in range(_ATTEMPTS):
        _empty_maps([file])
        advise_out(file)
        left = cached_bytes(file)
        if left <= _most_left(file.stat().st_size):
            break
        time.sleep(0.02 * attempt)
    return left


def _most_left(total: int) -> float:
    return max(_TRACE * total, 16 * mmap.PAGESIZE)


def warm(files: Iterable[Path]) -> None:
    """Read `files` into the page cache, and verify that they are cached.

    Raises:
        BenchmarkError: They were evicted again: there is too little memory.
    """
    for file in files:
        cached, total = _read_in(file), file.stat().st_size
        if cached < _enough(total):
            raise BenchmarkError(f"only {cached:,} of {total:,} bytes of {file.name} stay in the page cache")


def _read_in(file: Path) -> int:
    """Read `file`, again if the kernel has reclaimed pages meanwhile (DAMON does so early); return its cached bytes."""
    buffer = bytearray(8 * 2**20)
    for _ in range(_ATTEMPTS):
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass
        cached = cached_bytes(file)
        if cached >= _enough(file.stat().st_size):
            break
    return cached


def _enough(total: int) -> float:
    return (1 - _TRACE) * total - mmap.PAGESIZE


def cached_bytes(file: Path) -> int:
    """Return the bytes of `file` that are in the page cache."""
    size = file.stat().st_size
    if size == 0:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    libc = c_library()
    with file.open("rb") as source, mmap.mmap(source.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        address = address_of(view, size)
        found = (ctypes.c_ubyte * pages)()
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found):
            raise OSError(ctypes.get_errno(), f"mincore failed on {file}")
    return sum(byte & 1 for byte in found) * mmap.PAGESIZE


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's pages that are in this process's resident set."""
    first, last = tensor.data_ptr() // mmap.PAGESIZE, (tensor.data_ptr() + tensor.nbytes - 1) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = os.pread(pagemap.fileno(), 8 * (last - first + 1), 8 * first)
    # The top bit of each page's eight bytes says that it is present.
    return sum(byte >> 7 for byte in entries[7::8]) * mmap.PAGESIZE


def _empty_maps(files: Sequence[Path]) -> None:
    """Drop the pages of all maps that this process has of `files`; none where the host has no list of maps."""
    if not _MAPS.exists():
        return
    wanted = {str(file.resolve()) for file in files}
    libc = c_library()
    for line in _MAPS.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in wanted:
            start, end = (int(text, 16) for text in fields[0].split("-"))
            failed = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
            # ENOMEM: the map was removed since the list was read (another thread, the garbage collector).
            if failed and ctypes.get_errno() != errno.ENOMEM:
                raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")


def advise_out(file: Path) -> None:
    """Ask the kernel to evict `file` from the page cache. Pages that any process has mapped stay."""
    if not hasattr(os, "posix_fadvise"):
        raise BenchmarkError("this system has no posix_fadvise, so cold reads cannot be measured on it")
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def address_of(view: mmap.mmap, size: int) -> int:
    """Return the address of a read-only map, which ctypes alone does not give."""
    import numpy

    return int(numpy.frombuffer(view, dtype=numpy.uint8, count=size).ctypes.data)


def c_library() -> ctypes.CDLL:
    """Return the C library; BenchmarkError on a system without the needed functions."""
    if sys.platform != "linux":
        raise BenchmarkError("the page cache can be inspected on Linux only")
    return ctypes.CDLL(None, use_errno=True)
