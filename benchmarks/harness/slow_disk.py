"""Simulates a disk of a set bandwidth: reads of files by a `DiskReader` take as long as they would there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from unittest import mock

import torch

from bigmodel.dispatch.transfer.files import SourceFile


class SlowDisk:
    """A disk that reads one request after the other, whichever thread asks.

    Args:
        rate: Bytes per second.

    Attributes:
        nbytes: Bytes that were read.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.nbytes = 0
        self._lock = threading.Lock()
        self._idle_from = 0.0

    def read(self, nbytes: int) -> None:
        """Block the calling thread until so many bytes have been read behind all others."""
        with self._lock:
            self._idle_from = max(self._idle_from, time.perf_counter()) + nbytes / self.rate
            until = self._idle_from
            self.nbytes += nbytes
        time.sleep(max(until - time.perf_counter(), 0.0))


@contextlib.contextmanager
def slow_disk(rate: float) -> Iterator[SlowDisk]:
    """Within this context files are read at `rate` bytes per second, those in the page cache, too."""
    disk = SlowDisk(rate)
    read, view_cached = SourceFile.read, SourceFile.view_cached

    def slow_read(file: SourceFile, memory: memoryview, offset: int, needed: int, bypass: bool = False) -> None:
        read(file, memory, offset, needed, bypass)
        disk.read(needed)

    def slow_view(file: SourceFile, offset: int, needed: int) -> torch.Tensor | None:
        found = view_cached(file, offset, needed)
        if found is not None:
            disk.read(needed)
        return found

    with mock.patch.object(SourceFile, "read", slow_read), mock.patch.object(SourceFile, "view_cached", slow_view):
        yield disk
