"""The link between the host and one virtual accelerator: a bandwidth, a latency, what a launch costs, and counters."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..forks import new_lock
from ..streams import copy_ready_since
from .clock import sleep_until


class VirtualLink:
    """Makes copies take as long as they would on a link of the given speed.

    Copies over one link in one direction queue behind each other, as on a real bus; the two directions are
    independent. A copy occupies the link for ``latency + nbytes / bandwidth`` seconds, from the time it was ready or
    the previous copy ended. The time in which a copy stream's thread switches to the next copy, or waits for the
    interpreter or a core while it copies, does not count: a real device copies by itself.

    Args:
        bandwidth: Bytes per second in each direction; None: the speed of host memory.
        latency: Seconds per copy; ignored without a bandwidth.
        launch_cost: Seconds that the host is busy with each operation or copy that it launches, besides Python's own.
    """

    def __init__(self, bandwidth: float | None = None, latency: float = 0.0, launch_cost: float = 0.0) -> None:
        self.bandwidth = bandwidth
        self.latency = latency
        self.launch_cost = launch_cost
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self._free = {True: 0.0, False: 0.0}
        self._to_device = new_lock()
        self._to_host = new_lock()

    def transfer(self, copy: Callable[[], None], nbytes: int, *, to_device: bool) -> None:
        """Run `copy`, which moves `nbytes`, and return when the link would have finished it; 0 bytes take no time."""
        if nbytes == 0:
            copy()
            return
        with self._to_device if to_device else self._to_host:
            ready, now = copy_ready_since(), time.perf_counter()
            begin = now if ready is None else min(now, max(ready, self._free[to_device]))
            self._free[to_device] = end = begin + self.seconds(nbytes)
            copy()
            sleep_until(end)
            if to_device:
                self.bytes_to_device += nbytes
            else:
                self.bytes_to_host += nbytes

    def launch(self) -> None:
        """Hold the calling thread as long as a launch takes it."""
        if self.launch_cost:
            sleep_until(time.perf_counter() + self.launch_cost)

    def seconds(self, nbytes: int) -> float:
        """Return how long `nbytes` occupy the link."""
        return 0.0 if not self.bandwidth else self.latency + nbytes / self.bandwidth
