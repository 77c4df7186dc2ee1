"""How much of the host's memory weights on disk pass through where the host itself computes with them."""

from __future__ import annotations

from collections.abc import Collection

AHEAD_BYTES = 64 * 2**20
"""How much of what comes next is brought into memory while something is computed with."""


def read_ahead_window(blocks: Collection[int]) -> int:
    """Return the least memory that weights on disk are run in: the largest block, and the beginning of the next one.

    Args:
        blocks: bytes of each block that is brought in as a whole.
    """
    largest = max(blocks, default=0)
    return min(sum(blocks), largest + min(largest, AHEAD_BYTES))
