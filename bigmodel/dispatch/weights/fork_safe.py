"""Objects whose threads and locks belong to one process, and are created again in a forked child."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod

from ...devices.forks import new_rlock

_starting = new_rlock()
_started: weakref.WeakSet[ForkSafe] = weakref.WeakSet()


class ForkSafe(ABC):
    """Base class of objects with threads and locks of one process.

    A fork copies locks in their current state, but only the forking thread: locks held by other threads are never
    released in the child, and their work is never finished. A child therefore starts the object again before its first
    use.

    Attributes:
        is_started: Whether it was started in this process. If not, users call `start` first.
    """

    is_started = False

    def start(self) -> None:
        """Start, unless another thread has done so."""
        with _starting:
            if not self.is_started:
                self._start()
                _started.add(self)
                self.is_started = True

    @abstractmethod
    def _start(self) -> None:
        """Create the threads, locks and state of one process."""

    def _forked(self) -> None:
        """Mark it as not started, in a forked child, and restore invariants. Must not use any device."""
        self.is_started = False


def _in_child() -> None:
    for each in list(_started):
        each._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
