"""How much host memory is pinned: a GPU copies from it at full speed, but the kernel can never move or swap it."""

from __future__ import annotations

import psutil
import torch

PINNED_SHARE = 0.5
"""Share of the host's memory that is pinned at most where nothing was said: more of it would starve all else."""


class PinnedBudget:
    """Hands out the right to pin host memory, once each, before anything runs.

    Args:
        device: Where pinned memory is copied to; only CUDA wins by it.
        limit: Bytes; None takes `PINNED_SHARE` of the host's memory.

    Attributes:
        left: Bytes that may still be pinned.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        wanted = int(PINNED_SHARE * psutil.virtual_memory().total) if limit is None else limit
        self.left = wanted if device.type == "cuda" else 0

    def take(self, nbytes: int) -> bool:
        """Return whether `nbytes` may be pinned, and count them if so. What may not is copied from as it lies."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True
