"""Measures how fast a disk is read: from the disk itself, and from the kernel's cache of its files."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .effort import Effort

STEP = 4 * 2**20
THREADS = 2


def disk_rates(folder: Path, effort: Effort) -> tuple[float, float]:
    """Return bytes per second read cold and warm, from a file that is written to `folder` and taken away again.

    Cold reads go past the kernel's cache; where the file system does not allow that, the file is thrown out first.
    """
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".bigmodel-probe-")
    direct = _open_direct(name, descriptor)
    os.unlink(name)  # now, so that nothing is left behind even if the process is killed
    try:
        block = os.urandom(2**20)
        for _ in range(max(1, effort.file // len(block))):
            os.write(descriptor, block)
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
        cold = statistics.median(_cold(direct, descriptor, size) for _ in range(effort.repeats))
        _read(descriptor, size)
        warm = statistics.median(_read(descriptor, size) for _ in range(effort.repeats))
        return cold, warm
    finally:
        os.close(direct)
        os.close(descriptor)


def _open_direct(name: str, descriptor: int) -> int:
    """Return a descriptor that reads past the kernel's cache; where the file system has none, another plain one."""
    try:
        return os.open(name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.dup(descriptor)


def _cold(direct: int, descriptor: int, size: int) -> float:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        return _read(direct, size)
    except OSError:
        return _read(descriptor, size)


def _read(descriptor: int, size: int) -> float:
    """Return bytes per second of reading everything, by two threads into memory they use again and again."""

    def work(first: int) -> None:
        with mmap.mmap(-1, STEP) as memory:
            for offset in range(first * STEP, size, THREADS * STEP):
                os.preadv(descriptor, [memory], offset)

    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    return size / (time.perf_counter() - started)
