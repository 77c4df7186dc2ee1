"""Simulates a machine without memory beyond a budget: pages that a process releases are evicted from the page cache."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from unittest import mock

import torch

from bigmodel.checkpoint import MappedRegion, mapped_region, release
from bigmodel.dispatch.mapped import mapped_block

from .errors import BenchmarkError


@contextlib.contextmanager
def evicting_behind() -> Iterator[None]:
    """Within this context a thread evicts weights that a model releases from the page cache, too.

    A kernel with free memory would keep them, where a smaller machine reads them from disk again. Pages shared with
    neighbours that are still mapped stay.

    Raises:
        BenchmarkError: A file could not be opened, so pages of it may have stayed.
    """
    regions: queue.SimpleQueue[MappedRegion | None] = queue.SimpleQueue()
    failures: list[OSError] = []

    def release_and_evict(tensor: torch.Tensor) -> None:
        region = mapped_region(tensor)
        release(tensor)
        if region is not None:
            regions.put(region)

    evictor = threading.Thread(target=_evict, args=(regions, failures), name="evict behind")
    evictor.start()
    try:
        with mock.patch.object(mapped_block, "release", release_and_evict):
            yield
    finally:
        regions.put(None)
        evictor.join()
    if failures:
        raise BenchmarkError(f"released pages may have stayed in memory: {failures[0]}") from failures[0]


def _evict(regions: queue.SimpleQueue[MappedRegion | None], failures: list[OSError]) -> None:
    while (region := regions.get()) is not None:
        try:
            descriptor = os.open(region.path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, region.offset, region.nbytes, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        except OSError as error:
            failures.append(error)
