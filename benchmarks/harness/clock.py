"""Timing of work, including work that is queued on a device."""

from __future__ import annotations

import time
from collections.abc import Callable


def elapsed(work: Callable[[], object], device: str = "cpu") -> float:
    """Run `work` and return the seconds until its results are available.

    Args:
        work: The work to time.
        device: Its device; an asynchronous device is synchronized before and after.
    """
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    """Wait until `device`, and all others of its type, have finished all queued work."""
    if device.partition(":")[0] in ("cuda", "xpu", "mps"):
        import torch

        from bigmodel.profile.machine import timing

        timing.synchronize(torch.device(device))
