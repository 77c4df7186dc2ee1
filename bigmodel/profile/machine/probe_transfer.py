"""Measures transfer speeds: over the links of a device, from host memory, and from disk, cold and cached."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ...limits import MOST_READERS, READERS
from .machine import DeviceLinks, LinkSpeed
from .timing import Effort, seconds_of


def probe_links(device: torch.device, effort: Effort, peer: torch.device | None = None) -> DeviceLinks:
    """Measure the links of an accelerator. Without pinned memory, those of pageable memory are used.

    Args:
        device: the accelerator; the host stands for copies within its memory.
        effort: sizes and repetitions.
        peer: another accelerator of the same kind; None: there is none.
    """
    pinned = device.type == "cuda"
    return DeviceLinks(
        to_device=_link(device, effort, pinned, to_device=True),
        to_device_pageable=_link(device, effort, False, to_device=True),
        to_host=_link(device, effort, pinned, to_device=False),
        to_host_pageable=_link(device, effort, False, to_device=False),
        disturbance=0.0 if pinned else _disturbance(device, effort),
        to_peer=None if peer is None else _peer_link(device, peer, effort),
    )


def _peer_link(device: torch.device, peer: torch.device, effort: Effort) -> LinkSpeed:
    def seconds(nbytes: int) -> float:
        source = torch.full((nbytes,), 1, dtype=torch.uint8).to(device)
        target = torch.empty(nbytes, dtype=torch.uint8, device=peer)
        return seconds_of(lambda: target.copy_(source), device, effort.at_least, effort.repeats)

    return _speed_of(effort.copied, *map(seconds, effort.copied))


def memory_rate(effort: Effort) -> float:
    """Return the bytes per second at which the host reads its memory."""
    data = torch.full((max(effort.spread // 4, 1),), 0.5)
    return data.nbytes / seconds_of(lambda: data.sum(), torch.device("cpu"), effort.at_least, effort.repeats)


def _disturbance(device: torch.device, effort: Effort) -> float:
    """Return the seconds of compute lost per byte that another thread copies to the device meanwhile."""
    matrix, rows = (torch.full((effort.width, n), 0.5).to(device) for n in (effort.width, effort.prompt))
    host = torch.full((effort.copied[-1],), 1, dtype=torch.uint8)
    there = host.to(device)
    copied, stop = [0], threading.Event()

    def copy() -> None:
        while not stop.is_set():
            there.copy_(host)
            copied[0] += host.nbytes

    def multiply() -> float:
        started = time.perf_counter()
        while time.perf_counter() - started < 10 * effort.at_least:
            steps[0] += 1
            matrix @ rows
        return time.perf_counter() - started

    steps = [0]
    multiply()
    steps = [0]
    alone = multiply() / steps[0]
    thread = threading.Thread(target=copy, name="copy beside compute")
    thread.start()
    try:
        steps = [0]
        copied[0] = 0
        beside, nbytes = multiply(), copied[0]
    finally:
        stop.set()
        thread.join()
    return max(0.0, beside - alone * steps[0]) / max(nbytes, host.nbytes)


def _link(device: torch.device, effort: Effort, pinned: bool, to_device: bool) -> LinkSpeed:
    fast, slow = (_copy(device, nbytes, effort, pinned, to_device) for nbytes in effort.copied)
    return _speed_of(effort.copied, fast, slow)


def _speed_of(copied: tuple[int, ...], fast: float, slow: float) -> LinkSpeed:
    """Return latency and rate from the bytes and seconds of a small and a large copy."""
    small, large = copied
    rate = (large - small) / max(slow - fast, 1e-9)
    return LinkSpeed(rate, max(fast - small / rate, 0.0))


def _copy(device: torch.device, nbytes: int, effort: Effort, pinned: bool, to_device: bool) -> float:
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).fill_(1)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    source, target = (host, there) if to_device else (there, host)
    return seconds_of(lambda: target.copy_(source), device, effort.at_least, effort.repeats)


STEP = 4 * 2**20
"""Bytes of one read from disk."""


ENOUGH = 0.9
"""Share of the best rate that is worth no further threads."""


def disk_speed(folder: Path, effort: Effort, cores: int) -> tuple[int, float, float]:
    """Return the number of threads that read the disk at full speed, and their rates: see `disk_rates`.

    Args:
        folder: on the disk.
        effort: bytes and repetitions.
        cores: cores of the machine; no more than half of them read.
    """
    counts = [READERS]
    while counts[-1] < MOST_READERS and 4 * counts[-1] <= cores:
        counts.append(2 * counts[-1])
    rates = {count: disk_rates(folder, effort, count) for count in counts}
    best = max(cold for cold, _ in rates.values())
    chosen = next(count for count in counts if rates[count][0] >= ENOUGH * best)
    return chosen, *rates[chosen]


def disk_rates(folder: Path, effort: Effort, readers: int = READERS) -> tuple[float, float]:
    """Return bytes per second of cold and warm reads of a temporary file in `folder` by so many threads.

    Cold reads bypass the page cache; if the file system cannot, the file is dropped from the cache first.
    """
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".bigmodel-probe-")
    direct = _open_direct(name, descriptor)
    os.unlink(name)  # at once, so that nothing is left behind if the process is killed
    try:
        block = os.urandom(2**20)
        for _ in range(max(1, effort.file // len(block))):
            os.write(descriptor, block)
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
        cold = statistics.median(_cold(direct, descriptor, size, readers) for _ in range(effort.repeats))
        _read(descriptor, size, readers)
        warm = statistics.median(_read(descriptor, size, readers) for _ in range(effort.repeats))
        return cold, warm
    finally:
        os.close(direct)
        os.close(descriptor)


def _open_direct(name: str, descriptor: int) -> int:
    """Return a descriptor that bypasses the page cache; a plain one if the file system has none."""
    try:
        return os.open(name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.dup(descriptor)


def _cold(direct: int, descriptor: int, size: int, readers: int) -> float:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        return _read(direct, size, readers)
    except OSError:
        return _read(descriptor, size, readers)


def _read(descriptor: int, size: int, readers: int) -> float:
    """Return bytes per second of reading the whole file with so many threads into memory that they reuse."""

    def work(first: int) -> None:
        with mmap.mmap(-1, STEP) as memory:
            for offset in range(first * STEP, size, readers * STEP):
                os.preadv(descriptor, [memory], offset)

    started = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(work, range(readers)))
    return size / (time.perf_counter() - started)
