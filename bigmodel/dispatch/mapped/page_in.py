"""Page-in: have the kernel read the pages of a mapped block, and detect pages that it has evicted since."""

from __future__ import annotations

import time

from ...checkpoint import populate
from ...errors import CheckpointError, CheckpointFormatError
from ..transfer.page_cache import is_page_cached, major_faults
from ..weights.visits import StreamStats
from .mapped_block import MappedBlock, PageInStep


def page_in(block: MappedBlock, step: PageInStep, stats: StreamStats) -> Exception | None:
    """Page in one step of a block; return the error, if any.

    Args:
        block: The block, for the error message.
        step: The pages to read.
        stats: Counters of bytes and seconds.
    """
    # Only the first and the last page are checked: checking all would leave the disk idle.
    first, last = step.tensors[0], step.tensors[-1]
    if not (is_page_cached(first.data_ptr()) and is_page_cached(last.data_ptr() + last.nbytes - 1)):
        stats.add(from_disk=step.nbytes)
    try:
        with stats.reading():
            populate(step.tensors)
    except CheckpointError as error:
        failure = CheckpointFormatError(f"{block.files}: the weights of {block.name!r} cannot be read: {error}")
        failure.__cause__ = error
        return failure
    except Exception as error:
        return error
    return None


LOOK_SECONDS = 0.05
"""Seconds between checks for evicted pages. With CPU caches full of weights a check takes tens of microseconds; an
eviction that is noticed late costs time only."""


class PageWatch:
    """Detects that the kernel has evicted pages since all blocks were paged in.

    Attributes:
        all_ready: Whether all blocks have been paged in and no eviction was detected since.
    """

    def __init__(self) -> None:
        self.all_ready = False
        self._faults = 0
        self._looked = float("-inf")

    def begin(self) -> None:
        """Record that all blocks are in memory now."""
        self._faults = major_faults()
        self.all_ready = True

    def seems_complete(self, block: MappedBlock) -> bool:
        """Whether the last check, repeated after `LOOK_SECONDS`, found no evicted page.

        Args:
            block: The block to be used now, whose first page is checked.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return True
        self._looked = now
        return not self._lost_pages(block)

    def has_lost(self, block: MappedBlock) -> bool:
        """Return whether pages have been evicted since all blocks were in memory; if so, clear `all_ready`."""
        if not (self.all_ready and self._lost_pages(block)):
            return False
        self.all_ready = False
        return True

    def _lost_pages(self, block: MappedBlock) -> bool:
        return major_faults() != self._faults or not block.seems_in_memory()
