"""Page-in: have the kernel read pages of a mapped block, and watch for pages that it has evicted since."""

from __future__ import annotations

import time

from ...checkpoint import populate
from ...errors import CheckpointError, CheckpointFormatError
from ..transfer.page_cache import is_page_cached, major_faults
from ..weights.stats import StreamStats
from .mapped_block import MappedBlock, Step


def page_in(block: MappedBlock, step: Step, stats: StreamStats) -> Exception | None:
    """Have the kernel read the pages of `step`, a part of `block`, that are not in memory; return the error, if any.

    Args:
        block: Named in what is returned.
        step: What to bring in.
        stats: Where bytes and seconds are counted.
    """
    # Two pages stand for all: to look at each would leave the disk idle.
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
"""Seconds between checks for evicted pages: with the processor's caches full of weights a check takes some tens of
microseconds, and a page that is missed in between costs time and nothing else."""


class PageWatch:
    """Watches for pages that the kernel evicted since everything was in memory.

    Attributes:
        all_ready: Everything has been paged in, and no page was seen to be missing since.
    """

    def __init__(self) -> None:
        self.all_ready = False
        self._faults = 0
        self._looked = float("-inf")

    def begin(self) -> None:
        """Note that everything is in memory now."""
        self._faults = major_faults()
        self.all_ready = True

    def seems_complete(self, block: MappedBlock) -> bool:
        """Whether no page was missing at the last check, which is now if the last one is long past.

        Args:
            block: What is wanted now, and so checked.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return True
        self._looked = now
        return not self._lost_pages(block)

    def has_lost(self, block: MappedBlock) -> bool:
        """Return whether pages have been evicted since all were there; if so, not all are ready any more."""
        if not (self.all_ready and self._lost_pages(block)):
            return False
        self.all_ready = False
        return True

    def _lost_pages(self, block: MappedBlock) -> bool:
        return major_faults() != self._faults or not block.seems_in_memory()
