"""Which pages of this process exist in memory only: those of a private map that were written to."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import torch

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]

_FILE_PAGE, _SWAPPED, _PRESENT = 1 << 61, 1 << 62, -(1 << 63)
_ENTRY = 8
_ENTRIES = 2**14
"""Entries read at once."""


class _Scan(ctypes.Structure):
    """What PAGEMAP_SCAN is asked (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst)."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    ]


_PAGEMAP_SCAN = 3 << 30 | ctypes.sizeof(_Scan) << 16 | ord("f") << 8 | 16
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4


def has_private_page(begin: int, end: int) -> bool:
    """Whether any page from address `begin` to `end`, both at the beginning of a page, belongs to no file.

    Raises:
        OSError: The kernel does not tell.
    """
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        found = _scan(pagemap.fileno(), begin, end)
        return _read(pagemap.fileno(), begin, end) if found is None else found


def _scan(pagemap: int, begin: int, end: int) -> bool | None:
    """Have the kernel look, which takes it microseconds where pages are large. None: this one cannot."""
    regions = (ctypes.c_uint64 * 3)()
    question = _Scan(size=ctypes.sizeof(_Scan), start=begin, end=end, vec=ctypes.addressof(regions), vec_len=1)
    question.max_pages = 1
    question.category_inverted = question.category_mask = _IS_FILE
    question.category_anyof_mask = _IS_PRESENT | _IS_SWAPPED
    question.return_mask = _IS_PRESENT
    if _libc is None:
        return None
    count = int(_libc.ioctl(pagemap, _PAGEMAP_SCAN, ctypes.byref(question)))
    return None if count < 0 else count > 0


def _read(pagemap: int, begin: int, end: int) -> bool:
    """Read the entry of each page."""
    first, last = begin // mmap.PAGESIZE, end // mmap.PAGESIZE
    for page in range(first, last, _ENTRIES):
        nbytes = min(_ENTRIES, last - page) * _ENTRY
        raw = os.pread(pagemap, nbytes, page * _ENTRY)
        if len(raw) < nbytes:
            raise OSError(f"/proc/self/pagemap ends after {len(raw)} of {nbytes} bytes")
        entries = torch.frombuffer(bytearray(raw), dtype=torch.int64)
        in_memory = (entries & (_PRESENT | _SWAPPED)) != 0
        if bool((in_memory & ((entries & _FILE_PAGE) == 0)).any()):
            return True
    return False
