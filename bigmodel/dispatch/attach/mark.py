"""The mark of a dispatched model, readable without importing the dispatcher."""

from __future__ import annotations

from torch import nn

ATTRIBUTE = "_bigmodel_dispatched"
"""Attribute in which a dispatched model keeps its record."""


def is_dispatched(model: nn.Module) -> bool:
    """Whether `model` is dispatched itself, not only modules in it."""
    return ATTRIBUTE in model.__dict__
