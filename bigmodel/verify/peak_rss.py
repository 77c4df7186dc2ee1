"""Peak RSS attributable to tensors, corrected for malloc caching and for resident pages of mapped files."""

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
from ..profile import named_tensors, storage_key
from ..profile.model.tensors import owner_of

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in the GNU C library (malloc.h)."""

DEFAULT_MMAP_THRESHOLD = 2**25
"""The upper limit to which malloc raises its mmap threshold by itself in a process that frees large blocks."""

SAMPLE_SECONDS = 0.0005

COUNTERS = 2
"""The kernel's counters that make up the resident set of a process without shared memory: anonymous and file pages."""


def resolution() -> int:
    """Return the bytes by which a measured peak of the resident set may be off.

    The kernel takes its peak from counters to which each processor adds its pages in batches (``percpu_counter_batch``
    in lib/percpu_counter.c of Linux: 32, or twice the processors if that is more).
    """
    processors = os.cpu_count() or 1
    return COUNTERS * processors * (max(32, 2 * processors) - 1) * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory_at_once() -> None:
    """Make malloc return freed memory to the system at once, so that the resident set shows what is in use.

    To be called before large allocations: a freed block below the threshold stays resident between its neighbours, and
    later blocks, also large ones, are carved from it.
    """
    _set_thresholds(0, os.sysconf("SC_PAGE_SIZE"))


def keep_freed_memory() -> None:
    """Make malloc cache freed memory, as it does by default: faster, for measuring seconds."""
    _set_thresholds(2 * DEFAULT_MMAP_THRESHOLD, DEFAULT_MMAP_THRESHOLD)


def _set_thresholds(trim: int, mmap: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(TRIM_THRESHOLD, trim)
        libc.mallopt(MMAP_THRESHOLD, mmap)
    _trim()


def _trim() -> None:
    """Return free memory between blocks to the system: blocks carved from it later would not raise the resident set."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def host_bytes(model: nn.Module, device_map: Mapping[str, Any]) -> int:
    """Return the bytes of parameters and buffers that a model holds in host memory, tied ones once.

    Tensors that the map assigns to the host count even if they are views of a file whose pages the kernel may evict.
    """
    counted: dict[object, int] = {}
    for name, tensor, _is_buffer, _persistent in named_tensors(model):
        owner = owner_of(name, device_map)
        held = owner is not None and device_map[owner] == HOST
        if tensor.device.type == HOST and (held or not lies_on_disk(tensor)):
            counted[storage_key(tensor)] = tensor.nbytes
    return sum(counted.values())


class PeakRSS:
    """Measures by how much the resident set peaks above its initial size within a context.

    The peak is the kernel's own (``VmHWM``), which lags (`resolution`). The kernel loads and evicts
    pages of mapped files at will. With weights on disk, a thread therefore samples the resident set: file pages that
    were resident at the peak are subtracted, as far as they exceed the initial ones. Anonymous memory may peak at
    another moment; its own peak is a lower bound of the result.

    Args:
        files: whether weights are on disk.

    Attributes:
        grown: bytes above the initial resident set; available after the context is left.
    """

    def __init__(self, files: bool) -> None:
        self.grown = 0
        self._files = files
        self._peak = 0
        self._files_at_peak = 0
        self._anonymous_peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch the resident set")

    def __enter__(self) -> PeakRSS:
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
            self._sample()  # on a busy machine the thread may not have run at all
            anonymous = self._anonymous_peak - (self._start - self._files_at_start)
            self.grown = max(self.grown - (self._files_at_peak - self._files_at_start), anonymous)

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        total, files = _resident()
        self._anonymous_peak = max(self._anonymous_peak, total - files)
        if total >= self._peak:
            self._peak, self._files_at_peak = total, files


def _resident() -> tuple[int, int]:
    """Return the bytes of the resident set, and the bytes of its file-backed and shared pages."""
    with open("/proc/self/statm") as statm:
        _, total, shared, *_ = map(int, statm.read().split())
    page = os.sysconf("SC_PAGE_SIZE")
    return total * page, shared * page
