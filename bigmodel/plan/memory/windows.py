"""How much of the host's memory weights on disk pass through: to be computed with there, or to reach an accelerator."""

from __future__ import annotations

from collections.abc import Collection

AHEAD_BYTES = 64 * 2**20
"""How much of what comes next is brought into memory while something is computed with."""

STAGING_BYTES = 48 * 2**20
"""Host memory through which weights on disk reach an accelerator, at most."""


def read_ahead_window(blocks: Collection[int]) -> int:
    """Return the least memory that weights on disk are run in: the largest block, and the beginning of the next one.

    Args:
        blocks: bytes of each block that is brought in as a whole.
    """
    largest = max(blocks, default=0)
    return min(sum(blocks), largest + min(largest, AHEAD_BYTES))


def staging(blocks: Collection[int]) -> int:
    """Return the host memory that weights on disk are staged in on their way to an accelerator.

    Args:
        blocks: bytes of each block that is streamed from disk.
    """
    return min(sum(blocks), 2 * max(blocks, default=0), STAGING_BYTES)
