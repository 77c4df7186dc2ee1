"""Speculative reads: blocks that are expected next are read from disk before they are requested.

A block is requested when a slot on the device is free. Until then its first bytes wait in staging memory that would
otherwise be unused, so that the link need not wait for the disk at the start of each block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..weights.block import Block
from .read_job import Read
from .read_plan import Chunk, ReadPlan


@dataclass
class _Speculation:
    """The reads of one expected block, and those that have begun."""

    block: Block
    reads: ReadPlan
    begun: list[Read] = field(default_factory=list)

    @property
    def next_chunk(self) -> Chunk | None:
        return self.reads.chunks[len(self.begun)] if len(self.begun) < len(self.reads.chunks) else None


class SpeculativeReads:
    """The expected blocks and their speculative reads. `expect` may be called by any thread, the other methods by one
    thread only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: deque[Block] = deque()
        self._speculations: deque[_Speculation] = deque()

    def expect(self, blocks: Sequence[Block]) -> None:
        """Announce the blocks that will be requested next, in this order."""
        with self._lock:
            self._expected = deque(blocks)

    def next_read(self, plan: Callable[[Block], ReadPlan], begin: Callable[[Chunk], Read]) -> bool:
        """Begin the next read; return whether there was one.

        Args:
            plan: Plans the reads of a block.
            begin: Starts the read of a chunk.
        """
        if not self._speculations or self._speculations[-1].next_chunk is None:
            block = self._next_expected()
            if block is None:
                return False
            self._speculations.append(_Speculation(block, plan(block)))
        last = self._speculations[-1]
        if last.next_chunk is None:
            return self.next_read(plan, begin)
        last.begun.append(begin(last.next_chunk))
        return True

    def take(self, block: Block, reads: ReadPlan) -> list[Read]:
        """Return the speculative reads of a requested block that have begun; none if they do not match `reads`.

        The block, and those expected before it, are no longer expected.
        """
        with self._lock:
            if block in self._expected:
                while self._expected.popleft() is not block:
                    pass
        if not self._speculations or self._speculations[0].block is not block or self._speculations[0].reads != reads:
            return []
        if any(read.has_failed or read.slot.is_lost for read in self._speculations[0].begun):
            return []
        return self._speculations.popleft().begun

    def drop(self) -> list[Read]:
        """Discard all speculative reads; return those that have begun."""
        begun = [read for each in self._speculations for read in each.begun]
        self._speculations.clear()
        return begun

    def _next_expected(self) -> Block | None:
        """Return the first expected block without speculative reads."""
        begun = {each.block for each in self._speculations}
        with self._lock:
            return next((block for block in self._expected if block not in begun), None)
