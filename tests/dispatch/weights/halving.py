"""Writes through ``.data`` in a file of their own, as helpers of several models are."""

from __future__ import annotations

from torch import nn


def halve(module: nn.Linear) -> None:
    """Write to the module's weight as no version counter counts."""
    module.weight.data.mul_(0.5)


class Halving:
    """An object that a module may hold."""

    def apply_to(self, module: nn.Linear) -> None:
        """Write to the module's weight as no version counter counts."""
        module.weight.data.mul_(0.5)
