"""Moves parameters without losing their class and attributes, also in recurrent layers.

Recurrent layers (``nn.LSTM``, ...) refer to each weight by name and in the list ``_flat_weights``. Assigning an
attribute updates both; dispatching writes to ``_parameters`` directly, so it must update the list too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...devices import virtual
from .outside_use import PLAIN


def like(original: torch.Tensor, value: torch.Tensor, requires_grad: bool | None = None) -> torch.Tensor:
    """Return `value` as a Parameter with the class and attributes of `original`; as it is if that is a plain tensor.

    Args:
        original: The tensor that `value` replaces.
        value: The new elements; not copied.
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
    """Return `tensor` on `device`, a Parameter with the same attributes and hooks if it is one."""
    moved = like(tensor, tensor.detach().to(device=device, dtype=dtype or tensor.dtype))
    if moved.requires_grad and tensor.is_leaf and moved is not tensor:
        # The dicts themselves, so that the handles people have still remove hooks.
        if tensor._backward_hooks:
            moved._backward_hooks = tensor._backward_hooks
        for hook in (tensor._post_accumulate_grad_hooks or {}).values():
            moved.register_post_accumulate_grad_hook(hook)
    return moved


SecondPlace = tuple[list[Any], int]
"""A list of weights and an index in it."""


def second_places(module: nn.Module, key: str) -> list[SecondPlace]:
    """Return further references of `module` to its parameter `key`."""
    if not isinstance(module, nn.RNNBase) or key not in module._flat_weights_names:
        return []
    return [(module._flat_weights, module._flat_weights_names.index(key))]


def refresh_second_places(model: nn.Module) -> None:
    """Update ``_flat_weights`` of all recurrent layers of `model` from their parameters."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weights[:] = [module._parameters.get(name) for name in module._flat_weights_names]


def parts_with_dtype(model: nn.Module) -> dict[str, tuple[nn.Module, torch.dtype]]:
    """Return the parts of `model`, by name, that the modules around them cast to a dtype of their own in each forward,
    as transformers' routers (Switch Transformers, NLLB-MoE) do with their classifiers."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        dtype = vars(module).get("dtype")
        part = dict(module.named_children()).get("classifier") if isinstance(dtype, torch.dtype) else None
        if isinstance(dtype, torch.dtype) and part is not None:
            found[f"{name}.classifier" if name else "classifier"] = part, dtype
    return found


_CAST = "_bigmodel_cast_in_forward"


def is_cast_in_forward(tensor: torch.Tensor) -> bool:
    """Whether a parameter was put in the place of another by `cast_in_forward`."""
    return hasattr(tensor, _CAST)


def cast_in_forward(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> bool:
    """Cast the parameters of `module` and its parts, which are on `device`, by other parameters in their place.

    Returns:
        False, and nothing is changed: they are elsewhere, are moved, have gradients, or there are buffers to be cast.
    """
    held = [(part, name, value) for part in module.modules() for name, value in part._parameters.items()]
    found = [(part, name, value) for part, name, value in held if value is not None]
    if any(value.device != device or (value.requires_grad and torch.is_grad_enabled()) for _, _, value in found):
        return False
    if any(convert(buffer) is not buffer for buffer in module.buffers()):
        return False
    cast: dict[int, nn.Parameter] = {}
    for _, _, value in found:
        if id(value) not in cast:
            with torch.no_grad():
                converted = convert(value)
            if converted.device != device:
                return False
            made = value if converted is value else nn.Parameter(converted, requires_grad=value.requires_grad)
            cast[id(value)] = cast[id(made)] = made
    for part, name, value in found:
        made = cast[id(value)]
        if made is not value:
            setattr(made, _CAST, True)
            part._parameters[name] = made
    refresh_second_places(module)
    return True
