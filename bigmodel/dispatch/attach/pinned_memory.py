"""How much host memory is pinned: a GPU copies from it at full speed, but the kernel can never move or swap it."""

from __future__ import annotations

import torch


class PinnedBudget:
    """Hands out the right to pin host memory, once each, before anything runs.

    Args:
        device: Where pinned memory is copied to; only CUDA wins by it.
        limit: Bytes, as the plan has them.

    Attributes:
        left: Bytes that may still be pinned.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.left = limit if device.type == "cuda" else 0

    def take(self, nbytes: int) -> bool:
        """Return whether `nbytes` may be pinned, and count them if so. What may not is copied from as it lies."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True
