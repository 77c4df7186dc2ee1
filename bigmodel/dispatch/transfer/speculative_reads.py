"""Speculative reads: blocks that are expected next are read from disk before anybody asks for them.

A block is asked for when there is room for it on the device. Until then its bytes can wait in staging memory, where
some would be empty otherwise: so neither disk nor link waits for the other's first byte of each block.
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
    """A block that is expected: how it is read, what of that has begun, and what has not."""

    block: Block
    reads: ReadPlan
    begun: list[Read] = field(default_factory=list)

    @property
    def next_chunk(self) -> Chunk | None:
        return self.reads.chunks[len(self.begun)] if len(self.begun) < len(self.reads.chunks) else None


class SpeculativeReads:
    """Which blocks are expected, and what is read of them already. `expect` may be called by any thread, everything
    else by one thread only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: deque[Block] = deque()
        self._speculations: deque[_Speculation] = deque()

    def expect(self, blocks: Sequence[Block]) -> None:
        """Say which blocks will be asked for next, in this order."""
        with self._lock:
            self._expected = deque(blocks)

    def next_read(self, plan: Callable[[Block], ReadPlan], begin: Callable[[Chunk], Read]) -> bool:
        """Begin the next read; return whether there was one.

        Args:
            plan: How a block is read.
            begin: Begins with a chunk.
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

    def asked(self, block: Block, reads: ReadPlan) -> list[Read]:
        """Say that a block was asked for, which is to be read like this; return those reads that have begun.

        It is expected no more, nor is what was expected before it.
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
        """Give up all speculative reads; return the reads that have begun."""
        begun = [read for each in self._speculations for read in each.begun]
        self._speculations.clear()
        return begun

    def _next_expected(self) -> Block | None:
        """Return the first block that is expected after those that are read already."""
        begun = {each.block for each in self._speculations}
        with self._lock:
            return next((block for block in self._expected if block not in begun), None)
