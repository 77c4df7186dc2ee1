"""Seconds that small pieces of work take on a device, repeated until the figure can be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all it was given."""
    if device.type in ("cuda", "xpu", "mps"):
        torch.get_device_module(device.type).synchronize()


def seconds_of(work: Callable[[], object], device: torch.device, at_least: float = 0.02, repeats: int = 5) -> float:
    """Return the seconds of one call of `work`: the least of several runs, for what disturbs can only add.

    Args:
        work: what is timed; called a few times without being timed first.
        device: where it computes.
        at_least: seconds that each of the timed runs should take, so that clock and wake-ups do not count.
        repeats: how many timed runs.
    """
    work()
    synchronize(device)
    calls = 1
    while True:
        taken = _time(work, calls, device)
        if taken >= at_least or calls >= 4096:
            break
        calls = min(4096, max(calls * 2, int(calls * at_least / max(taken, 1e-9))))
    runs = [taken] + [_time(work, calls, device) for _ in range(repeats - 1)]
    return min(runs) / calls


def _time(work: Callable[[], object], calls: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return time.perf_counter() - started
