"""A machine without memory beyond a budget: what a process lets go of leaves the page cache as well."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from unittest import mock

import torch

from bigmodel.checkpoint import MappedRegion, mapped_region, release
from bigmodel.dispatch import mapped_block


@contextlib.contextmanager
def evicting_behind() -> Iterator[None]:
    """Have weights that a model lets go of thrown out of the page cache, too, by a thread of its own.

    A kernel with memory to spare would keep them, and give them back where a smaller machine reads its disk. Pages that
    lie partly on neighbours which are still mapped stay.
    """
    regions: queue.SimpleQueue[MappedRegion | None] = queue.SimpleQueue()

    def release_and_evict(tensor: torch.Tensor) -> None:
        region = mapped_region(tensor)
        release(tensor)
        if region is not None:
            regions.put(region)

    evictor = threading.Thread(target=_evict, args=(regions,), name="evict behind")
    evictor.start()
    try:
        with mock.patch.object(mapped_block, "release", release_and_evict):
            yield
    finally:
        regions.put(None)
        evictor.join()


def _evict(regions: queue.SimpleQueue[MappedRegion | None]) -> None:
    while (region := regions.get()) is not None:
        descriptor = os.open(region.path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, region.offset, region.nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
