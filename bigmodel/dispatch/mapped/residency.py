"""Residency of mapped blocks: the capacity for them, which step is paged in next, and which block is dropped for it.

If not all blocks fit, most stay and the others alternate. Dropping the least recently used block would read every block
in every cycle. The blocks that stay are spread evenly between the others, so that the disk is busy while a forward
computes with them. Of the alternating blocks the most recently used one is needed again last, and is dropped first
(Belady 1966).

The page cache keeps what is dropped, and evicts by least recent use. Blocks for which it has no memory are therefore
evicted when they are dropped: those that stay would be evicted for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from ...limits import READ_AHEAD_BYTES
from ...plan import read_ahead_window
from ..transfer.page_cache import page_cache_bytes, resident_bytes, resident_file_bytes
from ..weights.visits import StreamStats
from .mapped_block import MappedBlock, PageInStep

STEP_BYTES = 64 * 2**20
"""Bytes per request to the kernel: large, so that the time between requests is negligible."""

FINE_STEP_BYTES = 8 * 2**20
"""Bytes per request under a budget, which larger steps would overshoot."""

MARGIN = 1 / 128
"""Share of the budget left free for other allocations of the process until the next measurement."""


USED_MEASUREMENTS = 16
"""Latest measurements, a second apart, of other mapped files in use, of which the highest counts: some files are used
once in a pass, and the kernel may evict them in between."""


class Residency:
    """Decides which blocks to page in and to drop. The caller holds the lock that guards the blocks.

    Args:
        blocks: All mapped blocks.
        budget: Limit of the process's resident set in bytes. None: the machine's free memory.
        stats: Counter of dropped bytes.
        ahead: Bytes of the next block that must fit in addition to the one that is computed with.

    Attributes:
        order: The blocks in the expected order of use, the present one first.
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
        self._cached = len(blocks)
        self._free = 0
        self._used: deque[int] = deque(maxlen=USED_MEASUREMENTS)
        self._capacity = 0
        self._measured = float("-inf")

    def measure(self) -> None:
        """Update the capacity: how many bytes of blocks may be in memory."""
        if time.monotonic() - self._measured > 1.0:
            self._measured = time.monotonic()
            self._used.append(max(resident_file_bytes() - self._paged_in(), 0))
            self._free = max(page_cache_bytes(max(self._used)), self._least)
            self._cached = self._count_staying(self._free)
        if self._budget is not None:
            resident = resident_bytes()
            self._drop_unused(sparse=resident > self._budget)
            other = resident - self._paged_in()
            self._capacity = max(int(self._budget * (1 - MARGIN)) - other, self._least)
        else:
            self._capacity = self._free
        self._staying = self._count_staying(self._capacity)

    def next_step(self, waited_for: Sequence[MappedBlock], may_drop: bool) -> tuple[MappedBlock, PageInStep] | None:
        """Remove and return the step to page in next; None if there is none, or it does not fit now.

        Args:
            waited_for: Blocks that forwards are waiting for: they are paged in regardless of the capacity.
            may_drop: Whether other blocks may be dropped for it now.
        """
        for block in waited_for:
            if self._has_step(block):
                self._drop_until_fits(block.steps[0].nbytes, -1, may_drop)
                return block, block.steps.popleft()
        for distance, block in enumerate(self.order):
            if not block.is_ready and block.failure is None and self._has_step(block):
                if self._drop_until_fits(block.steps[0].nbytes, distance, may_drop):
                    return block, block.steps.popleft()
                return None
        return None

    def prepare(self, block: MappedBlock) -> None:
        """Divide the page-in of `block` into steps, unless that was done since it was last dropped."""
        if not block.planned:
            block.plan(self._step_bytes)

    def _count_staying(self, capacity: int) -> int:
        """Return how many blocks stay in memory of `capacity` bytes while the others alternate."""
        return max((stay for stay, need in enumerate(self._needs) if need <= capacity), default=0)

    def _has_step(self, block: MappedBlock) -> bool:
        self.prepare(block)
        return bool(block.steps)

    def _drop_until_fits(self, nbytes: int, distance: int, may_drop: bool) -> bool:
        """Drop blocks that are needed later than at `distance` until `nbytes` more fit; return whether they do."""
        while (missing := self._paged_in() + nbytes - self._capacity) > 0:
            if not (may_drop and self._drop_from_one(missing, distance)):
                return False
        return True

    def _drop_from_one(self, nbytes: int, distance: int) -> bool:
        """Drop `nbytes`, or all, of the block that is needed last, and later than at `distance`; return whether there
        was one.

        Blocks that should stay are dropped only for a block that a forward waits for.
        """
        later = {block: place for place, block in enumerate(self.order)}
        never = len(self.order)
        candidates = [b for b in self._blocks if b.may_drop and later.get(b, never) > distance]
        alternating = [b for b in candidates if self._rank[b] >= self._staying]
        if alternating or distance >= 0:
            candidates = alternating
        if not candidates:
            return False
        last = max(candidates, key=lambda block: later.get(block, never))
        self._stats.add(dropped=last.drop(nbytes, evict=self._rank[last] >= self._cached))
        return True

    def _drop_unused(self, sparse: bool) -> None:
        """Forget blocks whose pages the kernel has evicted. With `sparse`, also drop tables whose rows were looked up:
        which rows are in memory is unknown, so all are dropped."""
        for block in self._blocks:
            if block.users or block.running:
                continue
            if block.paged_in and not block.seems_in_memory():
                block.forget()
            if sparse and block.has_sparse:
                self._stats.add(dropped=block.drop())

    def _paged_in(self) -> int:
        return sum(block.paged_in for block in self._blocks)


def _needs(sizes: Sequence[int], ahead: int) -> list[int]:
    """Return the bytes needed if the first 0, 1, 2, ... of the blocks of these sizes stay in memory."""
    return [sum(sizes[:stay]) + read_ahead_window(sizes[stay:], ahead) for stay in range(len(sizes) + 1)]


def spread_order(count: int) -> list[int]:
    """Return the numbers 0 to `count` - 1 in an order of which every prefix is spread evenly over the range.

    They are sorted by their reversed binary digits (van der Corput 1935).
    """
    digits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda place: int(f"{place:0{digits}b}"[::-1], 2))
