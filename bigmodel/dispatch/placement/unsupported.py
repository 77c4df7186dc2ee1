"""Models that cannot be dispatched as a map says, refused before anything is moved."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...devices import is_accelerator
from ...devices.virtual import VirtualTensor
from ...errors import DispatchError
from .tensors import DeviceMapLookup, PlacedTensor


def refuse_unsupported(model: nn.Module, placement: DeviceMapLookup) -> None:
    """Raise DispatchError for weights that cannot be moved as the map wants, and for TorchScript that must be attached
    to.

    Args:
        model: The model, its weights where they were loaded.
        placement: The map.
    """
    placed = list(placement.tensors(model))
    for each in placed:
        _refuse_composite(each)
    several = len({each.execution_device for each in placed}) > 1
    streamed = {each.name for each in placed if _is_streamed(each)}
    for name, module in model.named_modules():
        inside = (f"{name}.{key}" if name else key for key in module.state_dict())
        if isinstance(module, torch.jit.ScriptModule) and (several or not streamed.isdisjoint(inside)):
            raise DispatchError(
                f"{name or 'the model'!r} is a TorchScript module, which keeps its weights and its forward to itself: "
                "dispatch the module that it was scripted from, or map the whole model to one device"
            )


def _refuse_composite(each: PlacedTensor) -> None:
    tensor = each.tensor
    is_sparse = tensor.layout is not torch.strided
    is_wrapper = is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, VirtualTensor)
    if is_sparse and each.storage_device != str(tensor.device):
        kind = str(tensor.layout).removeprefix("torch.")
    elif (is_sparse or is_wrapper) and (_is_streamed(each) or each.storage_device == "disk"):
        kind = type(tensor).__name__ if is_wrapper else str(tensor.layout).removeprefix("torch.")
    else:
        return
    raise DispatchError(
        f"{each.name} is a tensor of several parts ({kind}), which cannot be streamed, moved or kept on disk: map its "
        f"module to {tensor.device}, or quantise with offload_dtype= instead"
    )


def _is_streamed(each: PlacedTensor) -> bool:
    return each.offloaded and is_accelerator(each.execution_device)
