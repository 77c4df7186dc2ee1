"""`StagingMemory`: the host memory through which blocks on disk reach a device, in chunks.

Plans count it, and readers of files allocate it. A chunk is a power of two: so many bytes are pinned for each, whatever
it needs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ...limits import CHUNK_BYTES, FILE_ALIGNMENT, MIN_CHUNK_BYTES, READERS, STAGING_BYTES


class StagingMemory(NamedTuple):
    """Staging memory of one reader of files.

    Attributes:
        chunk_bytes: bytes of one chunk, which one read fills.
        chunks: number of chunks: some being filled, some full, some being copied.
    """

    chunk_bytes: int
    chunks: int

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return self.chunk_bytes * self.chunks


def staging_memory(blocks: Collection[int], most: int = STAGING_BYTES, readers: int = READERS) -> StagingMemory:
    """Return the memory in which blocks on disk are staged: as much as two of them take, and at least two pages.

    Args:
        blocks: bytes of each block.
        most: upper bound of all chunks, in bytes.
        readers: number of threads that read: each has as many chunks as `READERS` have, or more.
    """
    wanted = max(_wanted(blocks, most), 2 * FILE_ALIGNMENT)
    count = STAGING_BYTES // CHUNK_BYTES * max(readers, READERS) // READERS
    chunk = _power_of_two(min(max(wanted // count, MIN_CHUNK_BYTES), wanted // 2, CHUNK_BYTES))
    return StagingMemory(chunk, wanted // chunk)


def staging(blocks: Collection[int], most: int = STAGING_BYTES, readers: int = READERS) -> int:
    """Return the bytes of `staging_memory`; 0 if no block has any. Less than two pages count as they are."""
    wanted = _wanted(blocks, most)
    return wanted if wanted < 2 * FILE_ALIGNMENT else staging_memory(blocks, most, readers).nbytes


def _wanted(blocks: Collection[int], most: int) -> int:
    return min(sum(blocks), 2 * max(blocks, default=0), most)


def _power_of_two(nbytes: int) -> int:
    """Return the largest power of two that is not more than `nbytes`."""
    return 1 << (nbytes.bit_length() - 1)
