"""Cache of results by text: bounded, and not displaced by texts that come once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Values by text. Thread-safe.

    Values that were requested again have a share of their own: a burst of texts that come once takes little memory and
    displaces none of them.

    Args:
        once: most bytes of values that were requested once.
        again: most bytes of those that somebody has.
        size: returns the bytes of a value.
    """

    def __init__(self, once: int, again: int, size: Callable[[T], int]) -> None:
        self._once, self._again = _Share[T](once), _Share[T](again)
        self._size = size
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all texts and values."""
        return self._once.nbytes + self._again.nbytes

    def get(self, text: str) -> T | None:
        """Return the value of a text; None if there is none."""
        with self._lock:
            found = self._again.take(text) or self._once.take(text)
            if found is not None:
                self._again.put(text, *found)
        return None if found is None else found[0]

    def put(self, text: str, value: T) -> None:
        """Keep a value, unless the text has one."""
        with self._lock:
            if text not in self._once.held and text not in self._again.held:
                self._once.put(text, value, len(text) + self._size(value))


class _Share(Generic[T]):
    """Values with their bytes, the one that was asked for last at the end."""

    def __init__(self, most: int) -> None:
        self.held: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self.nbytes = 0
        self._most = most

    def take(self, text: str) -> tuple[T, int] | None:
        """Remove and return a value and its bytes; None if there is none."""
        found = self.held.pop(text, None)
        self.nbytes -= 0 if found is None else found[1]
        return found

    def put(self, text: str, value: T, nbytes: int) -> None:
        """Add a value, and drop the oldest others if they are too many together."""
        self.held[text] = value, nbytes
        self.nbytes += nbytes
        while self.nbytes > self._most and len(self.held) > 1:
            self.nbytes -= self.held.popitem(last=False)[1][1]
