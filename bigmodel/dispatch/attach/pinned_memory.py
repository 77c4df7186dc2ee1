"""The budget of pinned host memory. A GPU copies from it at full speed; the kernel can neither move nor swap it."""

from __future__ import annotations

import torch


class PinnedBudget:
    """Counts the bytes of host memory that are pinned while a model is dispatched.

    Args:
        device: Target of the copies; only CUDA benefits from pinned sources.
        limit: Bytes that may be pinned, from the plan.

    Attributes:
        left: Bytes that may still be pinned.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.left = limit if device.type == "cuda" else 0

    def take(self, nbytes: int) -> bool:
        """Return whether `nbytes` may be pinned, and count them if so."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True
