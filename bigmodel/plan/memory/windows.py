"""How much of the host's memory weights on disk pass through: to be computed with there, or to reach an accelerator."""

from __future__ import annotations

from collections.abc import Collection

from ...limits import READ_AHEAD_BYTES, STAGING_BYTES


def read_ahead_window(blocks: Collection[int], ahead: int = READ_AHEAD_BYTES) -> int:
    """Return the least memory that weights on disk are run in: the largest block, and the beginning of the next one.

    Args:
        blocks: bytes of each block that is brought in as a whole.
        ahead: bytes of the next one, at most.
    """
    largest = max(blocks, default=0)
    return min(sum(blocks), largest + min(largest, ahead))


def staging(blocks: Collection[int], most: int = STAGING_BYTES) -> int:
    """Return the host memory that weights on disk are staged in on their way to an accelerator.

    Args:
        blocks: bytes of each block that is streamed from disk.
        most: bytes it takes at most.
    """
    return min(sum(blocks), 2 * max(blocks, default=0), most)
