"""The budget of pinned host memory. A GPU copies from it at full speed; the kernel can neither move nor swap it."""

from __future__ import annotations

import torch

from ...devices.pinned import copies_from_pinned


class PinnedBudget:
    """Counts the bytes of host memory that are pinned while a model is dispatched.

    Args:
        device: Target of the copies; nothing is pinned for one that does not benefit from it.
        limit: Bytes that may be pinned, from the plan.

    Attributes:
        left: Bytes that may still be pinned.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.left = limit if copies_from_pinned(device) else 0

    def take(self, nbytes: int) -> bool:
        """Return whether `nbytes` may be pinned, and count them if so."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True
