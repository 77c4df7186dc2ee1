"""The host's highest mark, so taken that it says what tensors took: settings of the allocator, and pages of files."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import nn

from ..devices import HOST, max_memory_allocated, memory_allocated, reset_peak_memory
from ..dispatch.weights.fused_view import lies_on_disk
from ..module_names import owner_of
from ..profile import named_tensors, storage_key

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""What `mallopt` of the GNU C library calls these (malloc.h)."""

SETTLED = 2**25
"""Where the thresholds end up in a process that frees large blocks, if nobody sets them."""

SAMPLE_SECONDS = 0.0005


def return_freed_memory_at_once() -> None:
    """Have the C library hand freed memory back to the system, so that the resident set says what is in use.

    Before much was allocated: a block below the threshold that is freed between others stays resident, and is what
    later ones, large ones too, are cut from.
    """
    _set_thresholds(0, os.sysconf("SC_PAGE_SIZE"))


def keep_freed_memory() -> None:
    """Have the C library keep freed memory as it does when nothing is said; faster, for measuring seconds."""
    _set_thresholds(2 * SETTLED, SETTLED)


def _set_thresholds(trim: int, mmap: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(TRIM_THRESHOLD, trim)
        libc.mallopt(MMAP_THRESHOLD, mmap)
    _trim()


def _trim() -> None:
    """Have the C library hand back what is free between blocks, which later ones would be cut from unseen."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def host_bytes(model: nn.Module, device_map: Mapping[str, Any]) -> int:
    """Return the bytes of parameters and buffers that a model holds in host memory, tied ones once.

    Those that the map puts there count also where they are views of a file whose pages may be let go of again.
    """
    counted: dict[object, int] = {}
    for name, tensor, _is_buffer, _persistent in named_tensors(model):
        owner = owner_of(name, device_map)
        held = owner is not None and device_map[owner] == HOST
        if tensor.device.type == HOST and (held or not lies_on_disk(tensor)):
            counted[storage_key(tensor)] = tensor.nbytes
    return sum(counted.values())


class HostMark:
    """The highest mark of the resident set beyond where it began, while this context is entered.

    The mark is the kernel's own, which counts the last 30 pages of each processor late. Pages of files come and go as
    the kernel pleases: where weights are on disk, those that were resident at the mark beyond the ones at the beginning
    are taken off; a thread looks for the moment. All else may have been highest at another one: it looks for that, too.

    Args:
        files: weights are on disk.

    Attributes:
        grown: bytes, once left.
    """

    def __init__(self, files: bool) -> None:
        self.grown = 0
        self._files = files
        self._highest = 0
        self._files_then = 0
        self._highest_else = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch the resident set")

    def __enter__(self) -> HostMark:
        _trim()
        self._start, self._files_at_start = memory_allocated(HOST), _resident()[1]
        reset_peak_memory(HOST)
        if self._files:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.grown = max_memory_allocated(HOST) - self._start
        if self._files:
            self._done.set()
            self._thread.join()
            grown_else = self._highest_else - (self._start - self._files_at_start)
            self.grown = max(self.grown - (self._files_then - self._files_at_start), grown_else)

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            total, files = _resident()
            self._highest_else = max(self._highest_else, total - files)
            if total >= self._highest:
                self._highest, self._files_then = total, files


def _resident() -> tuple[int, int]:
    """Return the bytes of the resident set, and those that are pages of files or shared."""
    with open("/proc/self/statm") as statm:
        _, total, shared, *_ = map(int, statm.read().split())
    page = os.sysconf("SC_PAGE_SIZE")
    return total * page, shared * page
