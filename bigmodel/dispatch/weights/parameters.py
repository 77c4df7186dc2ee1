"""Parameters that keep their class and attributes when their values move, also in recurrent layers.

``nn.LSTM`` and its like refer to each weight under its name and in ``_flat_weights``. Assigning an attribute keeps the
two in step; what is put into ``_parameters`` directly, as dispatching does, has to be put into the list as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...devices import virtual
from .outside_use import PLAIN


def like(original: torch.Tensor, value: torch.Tensor, requires_grad: bool | None = None) -> torch.Tensor:
    """Return `value` as what `original` is: a Parameter with its attributes, or a plain tensor.

    Args:
        original: The tensor whose place `value` takes.
        value: The new elements; used as they are, not copied.
        requires_grad: Whether the new Parameter requires a gradient; None takes it from `original`.
    """
    if not isinstance(original, nn.Parameter):
        return value
    wants = original.requires_grad if requires_grad is None else requires_grad
    wants = wants and (value.is_floating_point() or value.is_complex())
    kind = PLAIN.get(type(original), type(original))
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter and type(value) is torch.Tensor:
        result: nn.Parameter = torch.Tensor._make_subclass(kind, value, wants)
    else:
        result = nn.Parameter(value, requires_grad=wants)
    if original.__dict__:
        result.__dict__.update(virtual.user_attributes(original))
    return result


def moved_like(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return `tensor` on `device`, a Parameter with the same attributes if it is one."""
    return like(tensor, tensor.detach().to(device=device, dtype=dtype or tensor.dtype))


SecondPlace = tuple[list[Any], int]
"""A list of weights, and which of them."""


def second_places(module: nn.Module, key: str) -> list[SecondPlace]:
    """Return where else `module` refers to its parameter `key`."""
    if not isinstance(module, nn.RNNBase) or key not in module._flat_weights_names:
        return []
    return [(module._flat_weights, module._flat_weights_names.index(key))]


def refresh_second_places(model: nn.Module) -> None:
    """Let all recurrent layers of `model` compute with the parameters that they have by name."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weights[:] = [module._parameters.get(name) for name in module._flat_weights_names]
