"""The budget of pinned host memory. A GPU copies from it at full speed; the kernel can neither move nor swap it."""

from __future__ import annotations

import torch

from ...devices.pinned import copies_from_pinned, registered_bytes


class PinnedBudget:
    """Counts the bytes of host memory that are pinned while a model is dispatched, rounded up to pages.

    Args:
        device: Target of the copies; nothing is pinned for one that does not benefit from it.
        limit: Bytes that may be pinned, from the plan.
        spare: Bytes that the host may hold beyond what is asked for, since pinned memory takes whole pages; None: any.

    Attributes:
        left: Bytes that may still be pinned.
    """

    def __init__(self, device: torch.device, limit: int, spare: int | None = None) -> None:
        self.left = limit if copies_from_pinned(device) else 0
        self._spare = spare

    def take(self, *nbytes: int) -> bool:
        """Return whether tensors of `nbytes` each may be pinned, and count them if so."""
        taken = sum(map(registered_bytes, nbytes))
        beyond = taken - sum(nbytes)
        if taken > self.left or (self._spare is not None and beyond > self._spare):
            return False
        self.left -= taken
        if self._spare is not None:
            self._spare -= beyond
        return True
