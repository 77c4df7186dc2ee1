"""The order in which blocks are visited, learned from what each thread has visited after what."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

B = TypeVar("B")


class _Thread(threading.local):
    """What the calling thread has visited last."""

    last: object = None


class VisitOrder(Generic[B]):
    """Says which blocks are expected after which. Threads may share it.

    After each block that block is expected which a thread visited after it the last time. A guess may be wrong, as
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
