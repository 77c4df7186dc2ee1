"""A module with some other attributes, for the time of one call, without touching the module."""

from __future__ import annotations

from typing import Any

from torch import nn


def stand_in(module: nn.Module, **attributes: Any) -> Any:
    """Return the class's own forward, bound to an object that is `module` in all but `attributes`.

    Args:
        module: Left as it is.
        attributes: What is different; may stand in the place of parameters.
    """
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__.update(attributes)
    other.__dict__.pop("forward", None)
    return type(module).forward.__get__(other)
