"""Whether weights are read past the page cache."""

from __future__ import annotations

import threading
import time

from ..devices import HOST, free_memory_bytes


class ReadPolicy:
    """Decides for each read whether it goes past the page cache.

    Bytes that are in the cache are read from there. Others are read through it if everything that will be read fits
    into memory, for then the next pass finds it there. If not, the cache would have thrown them out again by then (a
    cycle longer than an LRU cache never hits), and whichever way the disk has proved faster is taken.

    Args:
        nbytes: How many bytes are read again and again.
    """

    RETRY = 32
    """Every so many cold reads the way that is not preferred is tried again."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._pace = {True: 0.0, False: 0.0}
        self._cold = 0
        self._fits = True
        self._asked = float("-inf")

    def bypasses(self, cached: bool) -> bool:
        """Whether the next read should go past the cache, which holds its bytes or does not (`cached`)."""
        if cached or self._all_fits():
            return False
        with self._lock:
            self._cold += 1
            direct, buffered = self._pace[True], self._pace[False]
            preferred = not buffered or direct >= buffered
            return preferred if self._cold % self.RETRY else not preferred

    def record(self, bypassed: bool, nbytes: int, seconds: float) -> None:
        """Take note of how long a cold read of `nbytes` took."""
        pace = nbytes / max(seconds, 1e-9)
        with self._lock:
            known = self._pace[bypassed]
            self._pace[bypassed] = pace if not known else 0.8 * known + 0.2 * pace

    def _all_fits(self) -> bool:
        now = time.monotonic()
        if now - self._asked > 1.0:
            self._asked = now
            self._fits = self.nbytes < 0.8 * free_memory_bytes(HOST)
        return self._fits
