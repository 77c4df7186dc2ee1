"""Visits: a forward enters weights, computes with them and leaves them; and which visit is expected after which."""

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
    """Something that forwards of several threads enter and leave, wherever Ctrl-C interrupts them.

    Python raises KeyboardInterrupt between two bytecodes, at calls and at backward jumps only. The protocol rests on
    that:

    - A visit has a list of what it holds, empty at first.
    - `_enter` appends to the list and raises the counts that go with it without a call in between: both happen or
      neither does. It may raise before or after.
    - `_leave` gives back what is in the list; it lowers the counts and empties the list in the same way. When it is
      interrupted or fails it is called again, and then does what is left to do.

    So counts and lists agree at every moment, and nothing stays held after a visit.

    Type parameters: what a visit asks for, and what it then holds.

    Attributes:
        _lock: Guards all that threads share; a subclass's `_start` may rely on it.
        _changed: Notified when something is given back.
    """

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def _enter(self, request: R, held: list[H]) -> None:
        """Wait for what `request` asks for and add it to `held`."""

    @abstractmethod
    def _leave(self, held: list[H]) -> None:
        """Give back what is in `held` and empty it; there may be nothing in it."""

    def visit(self, request: R, compute: Callable[[list[H]], T]) -> T:
        """Return what `compute` returns, called with what is held for it.

        Raises:
            Exception: Whatever entering, `compute` or leaving raised; nothing is held then.
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
        """Hold what `request` asks for within this context. Code that Ctrl-C may interrupt calls `visit` instead."""
        if not self.is_started:
            self.start()
        held: list[H] = []
        try:
            self._enter(request, held)
            yield held
        finally:
            self._leave(held)


class _Thread(threading.local):
    """What the calling thread has visited last."""

    last: object = None


class VisitOrder(Generic[B]):
    """Says which blocks are expected after which. Threads may share it.

    After each block, the block is expected that a thread visited after it the last time. A guess may be wrong, as
    after a block that was skipped or repeated.

    Args:
        blocks: In the order in which they are expected at first; after the last one the first.
    """

    def __init__(self, blocks: Sequence[B]) -> None:
        self._next: dict[object, B] = dict(zip(blocks, [*blocks[1:], *blocks[:1]]))
        self._thread = _Thread()
        self._last: object = None

    def visit(self, block: B) -> bool:
        """Note that the calling thread visits `block`; return whether no other has visited one since it did so."""
        thread = self._thread
        last = thread.last
        if last is not None and last is not block:
            self._next[last] = block
        alone, self._last = self._last is last, block
        thread.last = block
        return alone

    def after(self, block: B, most: int) -> list[B]:
        """Return what is expected after `block`, at most so many, each once and without `block` itself."""
        found: dict[B, None] = {}
        following = self._next.get(block)
        while len(found) < most and following is not None and following is not block and following not in found:
            found[following] = None
            following = self._next.get(following)
        return list(found)
