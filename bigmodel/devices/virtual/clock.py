"""The time that a virtual accelerator of a set speed takes to compute, beside the program that launches its work.

Results are there at once, as the host computes them. What is modelled is when they would be: each stream has a time at
which its work will have been done. A product takes as long as its multiplications and additions at the set speed, from
when its stream is free and its device idle for so long; all other operations take no time. Streams that wait for events
take over their times, and a host that waits sleeps until then. So a program is as fast as it would be on such
accelerators, as long as the host computes a product faster than they do.
"""

from __future__ import annotations

import time
from typing import Any

from ..forks import new_lock


def sleep_until(end: float) -> None:
    """Sleep until shortly before `end` (`time.perf_counter`), less the timer's slack, then spin, so that short waits
    are exact."""
    slack = 60e-6
    remaining = end - time.perf_counter()
    if remaining > slack:
        time.sleep(remaining - slack)
    while time.perf_counter() < end:
        time.sleep(0)


class ComputeClock:
    """When one device has computed the products that were launched on it, one at a time.

    One that was launched later, on another stream, may be computed while the device has nothing else to do.

    Args:
        flops: Multiplications and additions per second; None: products take no time beside the host's.
    """

    def __init__(self, flops: float | None = None) -> None:
        self.flops = flops
        self._busy: list[tuple[float, float]] = []
        self._lock = new_lock()

    def compute(self, ready: float, operands: tuple[Any, Any]) -> float:
        """Return when the product of two tensors is done, whose stream is free from the time `ready` on."""
        if not self.flops:
            return ready
        left, right = operands
        seconds = 2 * left.numel() * right.shape[-1] / self.flops
        with self._lock:
            return self._take(max(time.perf_counter(), ready), seconds)

    def _take(self, begin: float, seconds: float) -> float:
        """Return the end of the first so many seconds from `begin` on in which the device is idle, and be busy then."""
        now = time.perf_counter()
        self._busy = [each for each in self._busy if each[1] > now]
        place = 0
        for place, (start, end) in enumerate(self._busy, 1):
            if begin + seconds <= start:
                place -= 1
                break
            begin = max(begin, end)
        taken = begin, begin + seconds
        if place and self._busy[place - 1][1] == begin:
            self._busy[place - 1] = self._busy[place - 1][0], taken[1]
        else:
            self._busy.insert(place, taken)
        return taken[1]
