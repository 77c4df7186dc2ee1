"""The memory pages of tensors in mapped files: page them in, release them, and detect writes.

A page of a private map that was written to becomes a private page, which exists in memory only. The kernel reports
them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterable, Sequence

import torch

from ..errors import CheckpointError

_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_POPULATE_READ = 4, 14, 22
_CHUNK = 64 * 2**20
_GAP = 64 * 2**10
"""Ranges with a gap of at most so many bytes are paged in as one: a second call costs more than reading the gap."""

_COPIED = 8 * 2**20
"""Bytes that are copied at once before the pages they came from are released."""

HUGE_PAGES_AT_LEAST = 4 * 2**20
"""Ranges of at least so many bytes are put on huge pages."""

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_brief = ctypes.PyDLL(None) if sys.platform == "linux" else None
"""The same functions, called without giving up the interpreter's lock: getting it back from threads that read and
launch takes longer than a brief call."""
if _libc is not None:
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for _library in (_libc, _brief):
    if _library is not None:
        _library.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]

_BRIEF_BYTES = 256 * 2**20
"""The kernel is asked about the pages of so many bytes at most without giving up the lock: a few tenths of a
millisecond on small pages."""


def populate(tensors: Iterable[torch.Tensor]) -> None:
    """Page in CPU tensors: read their pages into memory and map them in this process's page table.

    Their first use then causes no page fault. The kernel does the reading, so threads may share the work. It reads onto
    huge pages where the file system supports them, which is faster even with little read-ahead, and makes computing on
    them faster.

    Raises:
        CheckpointError: the file of a tensor cannot be read, or has become shorter since it was mapped.
    """
    for begin, end in _merged(tensor for tensor in tensors if tensor.numel()):
        start = begin
        if end - begin >= HUGE_PAGES_AT_LEAST:
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
    """Release the pages that belong to `tensor` alone. It must view a private map of a file and be unmodified.

    They no longer count as memory of this process; the next use reads them again.
    """
    begin, end = pages_of(tensor)
    exact = tensor.data_ptr()
    begin += mmap.PAGESIZE if begin != exact else 0
    end -= mmap.PAGESIZE if end != exact + _span(tensor) else 0
    if begin < end and _libc is not None:
        _advise(begin, end - begin, _MADV_DONTNEED)


def empty_host(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised CPU tensor, on huge pages if it is large, which halves the time to fill it."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= HUGE_PAGES_AT_LEAST:
        begin, end = pages_of(tensor)
        _advise(begin + mmap.PAGESIZE, end - begin - 2 * mmap.PAGESIZE, _MADV_HUGEPAGE)
    return tensor


def aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a contiguous tensor that views a map, at an address that torch would choose.

    Pages of the original are released as they are copied, unless it was modified: both together hardly take more memory
    than one.
    """
    copied = empty_host(tuple(tensor.shape), tensor.dtype)
    source, target = tensor.detach().view(-1), copied.view(-1)
    unmodified = is_untouched(tensor)
    step = _COPIED // tensor.element_size()
    for start in range(0, source.numel(), step):
        part = source[start : start + step]
        target[start : start + step] = part
        if unmodified:
            release(part)
    return copied


def is_untouched(tensor: torch.Tensor) -> bool:
    """Whether a tensor that views a private map is unmodified, so has the bytes of the file.

    The kernel is asked, so every write is seen, also through ``.data`` or another view. A write to a neighbour on the
    same page counts too. Where the kernel does not tell (not Linux) the answer is False.
    """
    return are_untouched([tensor])


def are_untouched(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all tensors, which view private maps, are unmodified: see `is_untouched`. Those that lie side by side
    take one question to the kernel."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted(pages_of(tensor) for tensor in tensors if tensor.numel()):
        if ranges and begin <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((begin, end))
    try:
        return not has_private_page(ranges)
    except OSError:
        return False


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of `tensor` to the end of its last."""
    if tensor.numel() == 0:
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in strides)) * tensor.element_size()


def pages_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first page of `tensor`, and that of the first byte after its last page."""
    if tensor.numel() == 0:
        return 0, 0
    begin = tensor.data_ptr()
    end = begin + _span(tensor)
    return begin - begin % mmap.PAGESIZE, end + -end % mmap.PAGESIZE


def _merged(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the page ranges of `tensors`; ranges of one storage that are close to each other are merged.

    Ranges of different storages are not: addresses between them may not be mapped.
    """
    merged: list[tuple[int, int]] = []
    last = 0
    for (begin, end), storage in sorted((pages_of(tensor), tensor.untyped_storage().data_ptr()) for tensor in tensors):
        if merged and storage == last and begin <= merged[-1][1] + _GAP:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
        last = storage
    return merged


def _advise(start: int, size: int, advice: int) -> int:
    """Call madvise; return 0 or its error number."""
    if _libc is None:
        return errno.EINVAL
    return ctypes.get_errno() if _libc.madvise(start, size, advice) else 0


def _touch(start: int, size: int) -> None:
    """Read one byte of each page."""
    raw = (ctypes.c_char * size).from_address(start)
    torch.frombuffer(raw, dtype=torch.uint8)[:: mmap.PAGESIZE].sum()


_FILE_PAGE, _SWAPPED, _PRESENT = 1 << 61, 1 << 62, -(1 << 63)
_ENTRY = 8
_ENTRIES = 2**14
"""Entries of /proc/self/pagemap read at once."""


class _Scan(ctypes.Structure):
    """Argument of the ioctl PAGEMAP_SCAN (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst)."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    ]


_PAGEMAP_SCAN = 3 << 30 | ctypes.sizeof(_Scan) << 16 | ord("f") << 8 | 16
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4


def has_private_page(ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether any page within `ranges` of addresses is private: each begins and ends with a page.

    Raises:
        OSError: The kernel does not provide /proc/self/pagemap.
    """
    if not ranges:
        return False
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for begin, end in ranges:
            found = _scan(pagemap, begin, end)
            if _read_entries(pagemap, begin, end) if found is None else found:
                return True
        return False
    finally:
        os.close(pagemap)


def _scan(pagemap: int, begin: int, end: int) -> bool | None:
    """Return whether the kernel finds a private page, in microseconds on huge pages; None if it lacks PAGEMAP_SCAN."""
    regions = (ctypes.c_uint64 * 3)()
    scan = _Scan(size=ctypes.sizeof(_Scan), start=begin, end=end, vec=ctypes.addressof(regions), vec_len=1)
    scan.max_pages = 1
    scan.category_inverted = scan.category_mask = _IS_FILE
    scan.category_anyof_mask = _IS_PRESENT | _IS_SWAPPED
    scan.return_mask = _IS_PRESENT
    library = _brief if end - begin <= _BRIEF_BYTES else _libc
    if library is None:
        return None
    count = int(library.ioctl(pagemap, _PAGEMAP_SCAN, ctypes.byref(scan)))
    return None if count < 0 else count > 0


def _read_entries(pagemap: int, begin: int, end: int) -> bool:
    """Return whether the pagemap entry of any page marks it as private."""
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
