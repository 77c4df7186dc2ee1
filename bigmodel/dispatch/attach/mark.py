"""How a dispatched model is told from a plain one, without importing what dispatches."""

from __future__ import annotations

from torch import nn

ATTRIBUTE = "_bigmodel_dispatched"
"""Where a dispatched model keeps its record."""


def is_dispatched(model: nn.Module) -> bool:
    """Whether `model` is dispatched itself, not only modules in it."""
    return ATTRIBUTE in model.__dict__
