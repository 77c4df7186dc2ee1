"""The host memory through which tensors reach a device, or come from it: `StagingMemory` for blocks on disk, in chunks;
the same for a checkpoint that is loaded; and one piece of memory for gradients.

Plans count it; readers of files, loaders and backwards allocate it. All of it is in powers of two: so many bytes are
pinned for each piece, of any size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ...limits import (
    ALIGNMENT,
    CHUNK_BYTES,
    FILE_ALIGNMENT,
    GRADIENT_BYTES,
    MIN_CHUNK_BYTES,
    MOST_CHUNK_BYTES,
    READERS,
    STAGING_BYTES,
)
from ..result.budgets import Key


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
        readers: number of threads that read: each has a chunk, and at least `READERS` more are full or being copied.
    """
    wanted = max(_wanted(blocks, most), 2 * FILE_ALIGNMENT)
    count = max(STAGING_BYTES // CHUNK_BYTES, readers + READERS)
    largest = MOST_CHUNK_BYTES if readers > READERS else CHUNK_BYTES
    chunk = _power_of_two(min(max(wanted // count, MIN_CHUNK_BYTES), wanted // 2, largest))
    return StagingMemory(chunk, wanted // chunk)


def staging(blocks: Collection[int], most: int = STAGING_BYTES, readers: int = READERS) -> int:
    """Return the bytes of `staging_memory`; 0 if no block has any. Less than two pages count as they are."""
    wanted = _wanted(blocks, most)
    return wanted if wanted < 2 * FILE_ALIGNMENT else staging_memory(blocks, most, readers).nbytes


def upload_bytes(tensors: Mapping[Key, Collection[int]], most: int | None) -> int:
    """Return the bytes through which the tensors of a checkpoint reach each accelerator; 0 if `most` is too little.

    Args:
        tensors: bytes of each tensor that stays on an accelerator, by accelerator. Each has memory of its own.
        most: upper bound for all accelerators together, in bytes; None: as much as is useful.
    """
    loaded = [sizes for sizes in tensors.values() if sizes]
    limit = STAGING_BYTES if most is None or not loaded else min(most // len(loaded), STAGING_BYTES)
    if not loaded or limit < 2 * FILE_ALIGNMENT:
        return 0
    return max(staging_memory(sizes, limit).nbytes for sizes in loaded)


def upload_memory(nbytes: int) -> StagingMemory:
    """Return the chunks of `nbytes` that `upload_bytes` returned: as many bytes; of any other number, at most as many.

    None, of 0 bytes, if they are less than two pages.
    """
    if nbytes < 2 * FILE_ALIGNMENT:
        return StagingMemory(0, 0)
    return staging_memory([nbytes, nbytes], nbytes)


def gradient_bytes(blocks: Iterable[Collection[int]], most: int = GRADIENT_BYTES) -> int:
    """Return the bytes through which the gradients of any one block reach the host: a power of two, or 0 without any.

    Args:
        blocks: bytes of each gradient, by streamed block.
        most: upper bound in bytes.
    """
    wanted = max((sum(nbytes + ALIGNMENT for nbytes in block) for block in blocks), default=0)
    if not wanted or most < FILE_ALIGNMENT:
        return 0
    return min(max(FILE_ALIGNMENT, 1 << (wanted - 1).bit_length()), _power_of_two(most))


def _wanted(blocks: Collection[int], most: int) -> int:
    return min(sum(blocks), 2 * max(blocks, default=0), most)


def _power_of_two(nbytes: int) -> int:
    """Return the largest power of two that is not more than `nbytes`."""
    return 1 << (nbytes.bit_length() - 1)
