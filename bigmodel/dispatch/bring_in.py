"""Bring one step of a mapped block into memory."""

from __future__ import annotations

from ..checkpoint import populate
from ..errors import CheckpointError, CheckpointFormatError
from .mapped_block import MappedBlock, Step
from .page_cache import is_page_cached
from .stats import StreamStats


def bring_in(block: MappedBlock, step: Step, stats: StreamStats) -> Exception | None:
    """Have the kernel read the pages of `step`, a part of `block`, that are not in memory; return what went wrong.

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
