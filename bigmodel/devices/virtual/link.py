"""The link between host memory and one virtual accelerator: a bandwidth, a latency, and counters."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..forks import new_lock
from ..streams import due


class VirtualLink:
    """Makes copies take as long as they would on a link of the given speed.

    Copies over one link in one direction queue behind each other, as on a real bus; the two directions are
    independent. The time a copy occupies the link is ``latency + nbytes / bandwidth`` seconds, beginning when it was
    asked for, or when the link had ended the one before it: what a copy stream's thread needs to turn from one copy to
    the next is no time of the link's, on which a real device would have gone on by itself.

    Args:
        bandwidth: Bytes per second in each direction; None for as fast as host memory.
        latency: Seconds per copy, paid only when there is a bandwidth.
    """

    def __init__(self, bandwidth: float | None = None, latency: float = 0.0) -> None:
        self.bandwidth = bandwidth
        self.latency = latency
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self._free = {True: 0.0, False: 0.0}
        self._to_device = new_lock()
        self._to_host = new_lock()

    def transfer(self, copy: Callable[[], None], nbytes: int, *, to_device: bool) -> None:
        """Run `copy`, which moves `nbytes`, and return when the link would have finished it.

        What moves nothing waits for nothing.
        """
        if nbytes == 0:
            copy()
            return
        with self._to_device if to_device else self._to_host:
            asked, now = due(), time.perf_counter()
            begin = now if asked is None else min(now, max(asked, self._free[to_device]))
            end = begin + self.seconds(nbytes)
            copy()
            self._free[to_device] = max(end, time.perf_counter())
            _sleep_until(end)
            if to_device:
                self.bytes_to_device += nbytes
            else:
                self.bytes_to_host += nbytes

    def seconds(self, nbytes: int) -> float:
        """Return how long `nbytes` occupy the link."""
        return 0.0 if not self.bandwidth else self.latency + nbytes / self.bandwidth


def _sleep_until(end: float) -> None:
    """Sleep to within the timer's slack of `end`, then spin the rest so that short copies are timed right."""
    slack = 60e-6
    remaining = end - time.perf_counter()
    if remaining > slack:
        time.sleep(remaining - slack)
    while time.perf_counter() < end:
        time.sleep(0)
