"""Which mapped blocks are in memory: how many of their bytes may be, what comes in next, and what goes for it.

Where not all of them may stay, most do and the others take turns; dropping the least recently used one would mean to
read every block in every cycle. Those that stay are spread between the others, so that the disk is busy while a forward
computes with them. Of those that take turns the one that was used last is wanted again last of all, and is the first to
go (Belady 1966).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...devices import HOST, free_memory_bytes
from ...limits import READ_AHEAD_BYTES, RESIDENT_SHARE
from ...plan import read_ahead_window
from ..transfer.page_cache import resident_bytes
from ..weights.stats import StreamStats
from .mapped_block import MappedBlock, Step

STEP_BYTES = 64 * 2**20
"""Bytes asked of the kernel at once: so many that the time between two requests does not count."""

FINE_STEP_BYTES = 8 * 2**20
"""The same under a budget, which large steps would overshoot."""

MARGIN = 1 / 128
"""Share of the budget left free for what the process comes to take besides, until the next look at what it takes."""


class Residency:
    """Decides; whoever calls holds the lock that the blocks are changed under.

    Args:
        blocks: All of them.
        budget: Bytes that the process's resident set may take. None: what is free on the machine.
        stats: Where dropped bytes are counted.
        ahead: How much of the next block has room beside the one that is computed with, in bytes.

    Attributes:
        order: The blocks as they are expected to be wanted, the one that is wanted now first.
    """

    def __init__(
        self, blocks: Sequence[MappedBlock], budget: int | None, stats: StreamStats, ahead: int = READ_AHEAD_BYTES
    ) -> None:
        self.order: list[MappedBlock] = []
        self._blocks = blocks
        self._budget = budget
        self._stats = stats
        self._step_bytes = STEP_BYTES if budget is None else FINE_STEP_BYTES
        self._least = read_ahead_window([block.nbytes for block in blocks], ahead)
        self._rank = {blocks[place]: rank for rank, place in enumerate(spread_order(len(blocks)))}
        self._needs = _needs([block.nbytes for block in sorted(blocks, key=self._rank.__getitem__)], ahead)
        self._staying = 0
        self._room = 0
        self._measured = float("-inf")

    def measure(self) -> None:
        """Find out how many bytes of blocks may be in memory."""
        if self._budget is not None:
            resident = resident_bytes()
            self._let_go(of_sparse=resident > self._budget)
            other = resident - self._held()
            self._room = max(int(self._budget * (1 - MARGIN)) - other, self._least)
        elif time.monotonic() - self._measured > 1.0:
            self._measured = time.monotonic()
            self._room = max(int(RESIDENT_SHARE * free_memory_bytes(HOST)), self._least)
        self._staying = max((stay for stay, need in enumerate(self._needs) if need <= self._room), default=0)

    def next_step(self, waited_for: Sequence[MappedBlock], may_drop: bool) -> tuple[MappedBlock, Step] | None:
        """Take what is to be brought in next; None if nothing is, or there is no room for it now.

        Args:
            waited_for: Blocks that forwards are waiting for: these come in whatever room there is.
            may_drop: Whether others may be dropped for it now.
        """
        for block in waited_for:
            if self._has_step(block):
                self._make_room(block.steps[0].nbytes, -1, may_drop)
                return block, block.steps.popleft()
        for distance, block in enumerate(self.order):
            if not block.is_ready and block.failure is None and self._has_step(block):
                if self._make_room(block.steps[0].nbytes, distance, may_drop):
                    return block, block.steps.popleft()
                return None
        return None

    def prepare(self, block: MappedBlock) -> None:
        """Make the steps that bring `block` in, if that was not done since it was last dropped."""
        if not block.planned:
            block.plan(self._step_bytes)

    def _has_step(self, block: MappedBlock) -> bool:
        self.prepare(block)
        return bool(block.steps)

    def _make_room(self, nbytes: int, distance: int, may_drop: bool) -> bool:
        """Drop what is wanted later than at `distance` until `nbytes` more have room; return whether they have."""
        while self._held() + nbytes > self._room:
            if not (may_drop and self._drop_one(distance)):
                return False
        return True

    def _drop_one(self, distance: int) -> bool:
        """Drop the block that is wanted last of all, and later than at `distance`; return whether there was one.

        One that is to stay goes only for what a forward waits for.
        """
        later = {block: place for place, block in enumerate(self.order)}
        never = len(self.order)
        candidates = [b for b in self._blocks if b.may_drop and later.get(b, never) > distance]
        taking_turns = [b for b in candidates if self._rank[b] >= self._staying]
        if taking_turns or distance >= 0:
            candidates = taking_turns
        if not candidates:
            return False
        last = max(candidates, key=lambda block: later.get(block, never))
        self._stats.add(dropped=last.drop())
        return True

    def _let_go(self, of_sparse: bool) -> None:
        """Forget blocks whose pages the kernel has taken away, and drop rows that forwards looked up here and there:
        nobody knows which those are, so under pressure all go."""
        for block in self._blocks:
            if block.users or block.running:
                continue
            if block.held and not block.seems_in_memory():
                block.forget()
            if of_sparse and block.has_sparse:
                self._stats.add(dropped=block.drop())

    def _held(self) -> int:
        return sum(block.held for block in self._blocks)


def _needs(sizes: Sequence[int], ahead: int) -> list[int]:
    """Return the memory needed if none of the blocks of these sizes stays, if the first one does, the first two, ..."""
    return [sum(sizes[:stay]) + read_ahead_window(sizes[stay:], ahead) for stay in range(len(sizes) + 1)]


def spread_order(count: int) -> list[int]:
    """Return the places 0 to `count` - 1 in an order whose beginning, however long, is spread evenly over them.

    It is that of their binary digits read backwards (van der Corput 1935).
    """
    digits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda place: int(f"{place:0{digits}b}"[::-1], 2))
