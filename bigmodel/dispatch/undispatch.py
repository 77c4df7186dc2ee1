"""Undo what dispatching did to a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..devices import HOST, DeviceLike, torch_device
from .dispatched import dispatched
from .lasting import for_later
from .parameter import moved_like
from .recurrent import refresh_second_places


def undispatch(model: nn.Module, device: DeviceLike | None = None) -> nn.Module:
    """Give the plain model back: no attachments, no streams, every weight a plain tensor.

    Args:
        model: A dispatched model; a plain one is returned as it is.
        device: Where the weights go. None leaves a model that lies on one device there and brings any other to the
            host; weights on disk stay views of their memory-mapped file.

    Raises:
        DispatchError: A forward of the model is running.
    """
    found = dispatched(model)
    if found is None:
        return model
    found.refuse_while_running()
    found.detach(model)
    tensors = [*model.parameters(), *model.buffers()]
    if device is None and len({tensor.device for tensor in tensors}) <= 1:
        return model
    target = torch_device(HOST if device is None else device)
    with for_later():
        _gather(model, target, found.ties)
    return model


def _gather(model: nn.Module, target: torch.device, ties: Mapping[str, str]) -> None:
    """Move every tensor to `target`, those that were one tensor before dispatching being one again."""
    moved: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is None:
                    continue
                first = ties.get(dot + key, dot + key)
                if first not in moved:
                    moved[first] = tensor if tensor.device == target else moved_like(tensor, target)
                registry[key] = moved[first]
    refresh_second_places(model)
