"""PyTorch's default dtype, which transformers changes for the whole process while it builds a model.

Threads that build do it within `changing_default_dtype`; threads that compute while others may build, within
`computing_beside_builds`. Those that compute go on side by side, and wait while one builds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .forks import new_lock


class _Gate:
    """Lets in many that compute, or those that change what they compute with; the latter take precedence."""

    def __init__(self) -> None:
        self._condition = threading.Condition(new_lock())
        self._computing = 0
        self._changing = 0

    @contextmanager
    def compute(self) -> Iterator[None]:
        with self._condition:
            while self._changing:
                self._condition.wait()
            self._computing += 1
        try:
            yield
        finally:
            with self._condition:
                self._computing -= 1
                self._condition.notify_all()

    @contextmanager
    def change(self) -> Iterator[None]:
        with self._condition:
            self._changing += 1  # before waiting: one that computes step after step would never leave a gap
            while self._computing:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._changing -= 1
                self._condition.notify_all()


_gate = _Gate()
computing_beside_builds = _gate.compute
"""Context in which the default dtype does not change. A thread that is in it must not build a model."""

changing_default_dtype = _gate.change
"""Context in which the default dtype may be changed, and is restored."""
