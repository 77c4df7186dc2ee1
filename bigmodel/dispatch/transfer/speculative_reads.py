"""What is read of blocks that nobody has asked for yet, as they are expected next.

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
from .read_plan import Chunk, Reads


@dataclass
class _Guess:
    """A block that is expected: how it is read, what of that has begun, and what has not."""

    block: Block
    reads: Reads
    begun: list[Read] = field(default_factory=list)

    @property
    def next_chunk(self) -> Chunk | None:
        return self.reads.chunks[len(self.begun)] if len(self.begun) < len(self.reads.chunks) else None


class Anticipation:
    """Which blocks are expected, and what is read of them already. `expect` may be called by any thread; all else is
    the affair of one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: deque[Block] = deque()
        self._guesses: deque[_Guess] = deque()

    def expect(self, blocks: Sequence[Block]) -> None:
        """Say which blocks will be asked for next, in this order."""
        with self._lock:
            self._expected = deque(blocks)

    def next_read(self, plan: Callable[[Block], Reads], begin: Callable[[Chunk], Read]) -> bool:
        """Begin the next read; return whether there was one.

        Args:
            plan: How a block is read.
            begin: Begins with a chunk.
        """
        if not self._guesses or self._guesses[-1].next_chunk is None:
            block = self._unguessed()
            if block is None:
                return False
            self._guesses.append(_Guess(block, plan(block)))
        guess = self._guesses[-1]
        if guess.next_chunk is None:
            return self.next_read(plan, begin)
        guess.begun.append(begin(guess.next_chunk))
        return True

    def asked(self, block: Block, reads: Reads) -> list[Read]:
        """Say that a block was asked for, which is to be read like this; return those reads that have begun.

        It is expected no more, nor is what was expected before it.
        """
        with self._lock:
            if block in self._expected:
                while self._expected.popleft() is not block:
                    pass
        if not self._guesses or self._guesses[0].block is not block or self._guesses[0].reads != reads:
            return []
        if any(read.has_failed or read.slot.is_lost for read in self._guesses[0].begun):
            return []
        return self._guesses.popleft().begun

    def drop(self) -> list[Read]:
        """Give up all guesses; return the reads that have begun."""
        begun = [read for guess in self._guesses for read in guess.begun]
        self._guesses.clear()
        return begun

    def _unguessed(self) -> Block | None:
        """Return the first block that is expected after those that are read already."""
        guessed = {guess.block for guess in self._guesses}
        with self._lock:
            return next((block for block in self._expected if block not in guessed), None)
