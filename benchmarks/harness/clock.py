"""Seconds that work takes, the work that it left queued on a device included."""

from __future__ import annotations

import time
from collections.abc import Callable


def elapsed(work: Callable[[], object], device: str = "cpu") -> float:
    """Run `work` and return the seconds until its results are there.

    Args:
        work: What is timed.
        device: Where it computes; a device with queues of its own is waited for, before and after.
    """
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    """Wait until `device` has done everything it was given."""
    kind = device.partition(":")[0]
    if kind in ("cuda", "xpu", "mps"):
        import torch

        torch.get_device_module(kind).synchronize()
