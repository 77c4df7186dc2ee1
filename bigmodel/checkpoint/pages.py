"""The pages behind tensors: bring them in, release them, and find out whether any was changed.

A private page exists in memory only: a page of a private map that was written to. The kernel reports them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterable

import torch

from ..errors import CheckpointError

_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_POPULATE_READ = 4, 14, 22
_CHUNK = 64 * 2**20
_GAP = 64 * 2**10
"""Ranges this close to each other are brought in as one: asking twice costs more than reading what lies between."""

_HUGE = 4 * 2**20

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]


def populate(tensors: Iterable[torch.Tensor]) -> None:
    """Bring the pages behind CPU tensors into memory and into this process's page table.

    Afterwards their first use meets no page fault. The kernel does the reading, so threads may share the work. It reads
    onto huge pages where the file system can, which is faster however little the disk is set to read ahead, and leaves
    pages that are faster to compute with.

    Raises:
        CheckpointError: the file behind a tensor cannot be read, or has become shorter since it was mapped.
    """
    for begin, end in _merged(tensor for tensor in tensors if tensor.numel()):
        start = begin
        if end - begin >= _HUGE:
            _advise(begin, end - begin, _MADV_HUGEPAGE)
        while start < end:
            size = min(_CHUNK, end - start)
            problem = _advise(start, size, _MADV_POPULATE_READ)
            if problem == errno.EINTR:
                continue
            if problem == errno.EINVAL:  # not Linux, or older than 5.14
                _touch(start, size)
            elif problem:
                raise CheckpointError(
                    f"{size} bytes of a mapped checkpoint cannot be read ({os.strerror(problem)}): "
                    "the file was cut short or the disk failed; copy or download it again"
                )
            start += size


def release(tensor: torch.Tensor) -> None:
    """Forget the pages that only `tensor` lies on, a tensor that shows a private map of a file and was not written to.

    They no longer count as memory of this process; the next use reads them again.
    """
    begin, end = _pages(tensor)
    exact = tensor.data_ptr()
    begin += mmap.PAGESIZE if begin != exact else 0
    end -= mmap.PAGESIZE if end != exact + _span(tensor) else 0
    if begin < end and _libc is not None:
        _advise(begin, end - begin, _MADV_DONTNEED)


def empty_host(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor in memory of its own, on huge pages where it is large: filling it costs half."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= _HUGE:
        begin, end = _pages(tensor)
        _advise(begin + mmap.PAGESIZE, end - begin - 2 * mmap.PAGESIZE, _MADV_HUGEPAGE)
    return tensor


def is_untouched(tensor: torch.Tensor) -> bool:
    """Whether a tensor that shows a private map still has the bytes of the file, none having been written to.

    Asks the kernel, so it sees every change, also one through ``.data`` or another view. A change on the same page
    by a neighbour counts too. Where the kernel does not tell (not Linux) the answer is False.
    """
    start, end = _pages(tensor)
    if start == end:
        return True
    try:
        return not has_private_page(start, end)
    except OSError:
        return False


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of `tensor` to the end of its last."""
    if tensor.numel() == 0:
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in strides)) * tensor.element_size()


def _pages(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of the first page behind `tensor`, and the first byte after its last page."""
    if tensor.numel() == 0:
        return 0, 0
    begin = tensor.data_ptr()
    end = begin + _span(tensor)
    return begin - begin % mmap.PAGESIZE, end + -end % mmap.PAGESIZE


def _merged(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The pages behind `tensors`, those close to each other in one storage as one range.

    What lies between two storages may not be mapped at all.
    """
    merged: list[tuple[int, int]] = []
    last = 0
    for (begin, end), storage in sorted((_pages(tensor), tensor.untyped_storage().data_ptr()) for tensor in tensors):
        if merged and storage == last and begin <= merged[-1][1] + _GAP:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
        last = storage
    return merged


def _advise(start: int, size: int, advice: int) -> int:
    """0, or the error number of the kernel's refusal."""
    if _libc is None:
        return errno.EINVAL
    return ctypes.get_errno() if _libc.madvise(start, size, advice) else 0


def _touch(start: int, size: int) -> None:
    """Read a byte of each page."""
    raw = (ctypes.c_char * size).from_address(start)
    torch.frombuffer(raw, dtype=torch.uint8)[:: mmap.PAGESIZE].sum()


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
