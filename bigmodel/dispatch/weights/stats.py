"""Counters of streaming: bytes, seconds, waits, hits and misses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class StreamStats:
    """Transfer counters of one device's weights since the last reset. Thread-safe.

    Attributes:
        bytes_from_ram: Bytes fetched from host memory.
        bytes_from_disk: Bytes fetched from files; for a model that runs on the host, bytes paged in ahead of use.
        bytes_dropped: Bytes whose memory was released to keep the host's budget.
        fetches: Blocks fetched, including prefetches.
        hits: Visits of blocks that had arrived or were being fetched.
        misses: Visits of blocks whose fetch began only then.
        seconds_waited: Seconds that forwards waited for weights. On devices with streams the device waits for copies,
            and this counts only the waits for the disk.
        seconds_reading: Seconds during which at least one thread read files.
        seconds_on_link: Seconds during which the link copied weights.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        with self._lock:
            self.bytes_from_ram = 0
            self.bytes_from_disk = 0
            self.bytes_dropped = 0
            self.fetches = 0
            self.hits = 0
            self.misses = 0
            self.seconds_waited = 0.0
            self.seconds_reading = 0.0
            self.seconds_on_link = 0.0
            self._began = self._reading_since = time.perf_counter()

    def add(
        self,
        *,
        from_ram: int = 0,
        from_disk: int = 0,
        dropped: int = 0,
        fetches: int = 0,
        waited: float = 0.0,
        on_link: float = 0.0,
    ) -> None:
        """Increase counters: bytes from RAM, from disk and dropped, blocks fetched, seconds waited and on the link."""
        with self._lock:
            self.bytes_from_ram += from_ram
            self.bytes_from_disk += from_disk
            self.bytes_dropped += dropped
            self.fetches += fetches
            self.seconds_waited += waited
            self.seconds_on_link += on_link

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time within this context as reading; concurrent contexts count once."""
        with self._lock:
            self._readers += 1
            if self._readers == 1:
                self._reading_since = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                if self._readers == 0:
                    self.seconds_reading += time.perf_counter() - self._reading_since

    @property
    def hit_rate(self) -> float:
        """Hits as a fraction of all visits; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def link_busy(self) -> float:
        """Fraction of the time since the last reset during which the link was copying."""
        return min(1.0, self.seconds_on_link / max(1e-9, time.perf_counter() - self._began))

    def as_dict(self) -> dict[str, float]:
        """Return the counters by name, with `hit_rate` and `link_busy`."""
        with self._lock:
            counters = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**counters, "hit_rate": self.hit_rate, "link_busy": self.link_busy}


def together(stats: Sequence[StreamStats]) -> dict[str, float]:
    """Return the sums of the counters of several streamers or readers of one device."""
    found = [each.as_dict() for each in stats]
    total = {name: sum(counters[name] for counters in found) for name in found[0]}
    total["hit_rate"] = total["hits"] / max(1, total["hits"] + total["misses"])
    total["link_busy"] = min(1.0, total["link_busy"])
    return total
