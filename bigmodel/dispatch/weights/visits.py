"""Visits: the protocol by which a forward acquires, uses and releases weights; and the predicted order of visits."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from .fork_safe import ForkSafe

R = TypeVar("R")
H = TypeVar("H")
T = TypeVar("T")
B = TypeVar("B")


class Visited(ForkSafe, Generic[R, H]):
    """Base class of resources that forwards of several threads enter and leave, safe against Ctrl-C at any point.

    Python raises KeyboardInterrupt only at calls and backward jumps. The protocol relies on that:

    - A visit has a list of the resources that it holds, empty at first.
    - `_enter` appends to the list and increments the matching use counts without a call in between, so both happen or
      neither. It may raise before or after.
    - `_leave` releases the resources in the list; it decrements the counts and empties the list in the same way. If it
      is interrupted or fails it is called again, and completes the rest.

    Counts and lists therefore agree at any time, and a visit leaves nothing held.

    Type parameters: the request of a visit, and the resource that it holds.

    Attributes:
        _lock: Guards all shared state; available to a subclass's `_start`.
        _changed: Notified when a resource is released.
    """

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def _enter(self, request: R, held: list[H]) -> None:
        """Wait for the requested resource and append it to `held`."""

    @abstractmethod
    def _leave(self, held: list[H]) -> None:
        """Release the resources in `held`, possibly none, and empty it."""

    def visit(self, request: R, compute: Callable[[list[H]], T]) -> T:
        """Return ``compute(held)``, called while the requested resources are held.

        Raises:
            Exception: The error of entering, `compute` or leaving; nothing is held then.
        """
        if not self.is_started:
            self.start()
        held: list[H] = []
        try:
            self._enter(request, held)
            return compute(held)
        finally:
            try:
                self._leave(held)
            except BaseException:
                self._leave(held)
                raise

    @contextmanager
    def use(self, request: R) -> Iterator[list[H]]:
        """Hold the requested resources within this context. Not safe against Ctrl-C; use `visit` for that."""
        if not self.is_started:
            self.start()
        held: list[H] = []
        try:
            self._enter(request, held)
            yield held
        finally:
            self._leave(held)


class _LastVisit(threading.local):
    """The block that the calling thread has visited last."""

    block: object = None


class VisitOrder(Generic[B]):
    """Predicts the order of blocks. Thread-safe.

    The predicted successor of a block is the one that a thread visited after it the last time. A prediction may be
    wrong, for example after a block that was skipped or repeated.

    Args:
        blocks: The blocks in the order predicted at first, cyclically.
    """

    def __init__(self, blocks: Sequence[B]) -> None:
        self._next: dict[object, B] = dict(zip(blocks, [*blocks[1:], *blocks[:1]]))
        self._thread = _LastVisit()
        self._last: object = None

    def visit(self, block: B) -> bool:
        """Record that the calling thread visits `block`; return whether no other thread made a visit since its last."""
        thread = self._thread
        last = thread.block
        if last is not None and last is not block:
            self._next[last] = block
        alone, self._last = self._last is last, block
        thread.block = block
        return alone

    def after(self, block: B, most: int) -> list[B]:
        """Return the predicted successors of `block`, at most `most`, each once and without `block` itself."""
        found: dict[B, None] = {}
        following = self._next.get(block)
        while len(found) < most and following is not None and following is not block and following not in found:
            found[following] = None
            following = self._next.get(following)
        return list(found)
