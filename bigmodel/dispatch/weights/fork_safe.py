"""Objects whose threads and locks belong to one process, and are made anew in a forked child."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod

from ...devices.forks import new_rlock

_starting = new_rlock()
_started: weakref.WeakSet[ForkSafe] = weakref.WeakSet()


class ForkSafe(ABC):
    """Something whose threads and locks serve the process that started it.

    A fork copies locks as they are, but only the thread that forks: locks that other threads held are never released
    in the child, and what those threads were doing is never finished. A child therefore starts the object anew before
    its first use.

    Attributes:
        is_started: Whether what `_start` makes belongs to this process. Users call `start` first if it does not.
    """

    is_started = False

    def start(self) -> None:
        """Start, unless another thread has done so meanwhile."""
        with _starting:
            if not self.is_started:
                self._start()
                _started.add(self)
                self.is_started = True

    @abstractmethod
    def _start(self) -> None:
        """Make what belongs to one process."""

    def _forked(self) -> None:
        """Note that this is a child now, and restore what must hold before any use. No device is touched."""
        self.is_started = False


def _in_child() -> None:
    for each in list(_started):
        each._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
