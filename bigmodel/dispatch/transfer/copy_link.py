"""The link to a device: a copy stream whose busy time is counted."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...devices import CopyStream, Event
from ..weights.stats import StreamStats


class Link:
    """Copies to one device, in order, beside its compute.

    Args:
        stream: The copy stream.
        device: Where it leads.
        stats: Where the seconds are counted during which it copies.
    """

    def __init__(self, stream: CopyStream, device: torch.device, stats: StreamStats) -> None:
        self._stream = stream
        self._stats = stats
        self._module: Any = torch.get_device_module(device.type) if device.type in ("cuda", "xpu") else None
        self._running: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()

    def copy(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        """Queue `work`, which copies `nbytes` bytes to the device (None: not known), behind all before it and behind
        `after`; return the event of its completion."""
        if self._module is None:
            return self._stream.submit(lambda: self._timed_by_host(work), after, nbytes)
        self._collect()
        return self._stream.submit(lambda: self._timed_by_device(work), after, nbytes)

    def _timed_by_host(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            work()
        finally:
            self._stats.add(on_link=time.perf_counter() - started)

    def _timed_by_device(self, work: Callable[[], None]) -> None:
        # The copy stream is the current one here, and what it had to wait for lies before the first of these.
        begin, end = self._module.Event(enable_timing=True), self._module.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        with self._lock:
            self._running.append((begin, end))

    def _collect(self) -> None:
        """Count the copies that have ended, without waiting for the others."""
        with self._lock:
            while self._running and self._running[0][1].query():
                begin, end = self._running.popleft()
                self._stats.add(on_link=begin.elapsed_time(end) / 1000)
