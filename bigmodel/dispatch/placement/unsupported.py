"""Models that cannot be dispatched as a map says, refused before anything is moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...devices import DISK, HOST, is_accelerator
from ...devices.virtual import VirtualTensor
from ...errors import DispatchError
from ..weights.fused_view import lies_on_disk
from .tensors import DeviceMapLookup, PlacedTensor


def refuse_unsupported(model: nn.Module, placement: DeviceMapLookup, has_hooks: bool = False) -> None:
    """Raise DispatchError for weights that cannot be moved as the map wants, for TorchScript that must be attached to,
    and for modules in plain lists and dicts, whose weights are not the model's.

    Args:
        model: The model, its weights where they were loaded.
        placement: The map.
        has_hooks: Its inputs are brought even if it is on one device.
    """
    placed = list(placement.tensors(model))
    for each in placed:
        _refuse_composite(each)
    if is_accelerator(placement.main_device) or any(is_accelerator(each.execution_device) for each in placed):
        _refuse_unregistered(model)
    places = {(each.storage_device, each.execution_device) for each in placed}
    if has_hooks or len(places) > 1 or not places <= {(placement.main_device, placement.main_device)}:
        _refuse_script(model)


def _refuse_script(model: nn.Module) -> None:
    """Refuse modules of TorchScript in a model of which anything is attached to."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise DispatchError(
                f"{name or 'the model'!r} is a TorchScript module, which keeps its weights and its forward to itself: "
                "dispatch the module that it was scripted from, or map the whole model to one device"
            )


def refuse_gradients(model: nn.Module, placement: DeviceMapLookup, from_host: bool) -> None:
    """Raise DispatchError for gradients of weights that are to be moved: no plan has counted their memory.

    Args:
        model: The model, nothing of it moved yet.
        placement: The map.
        from_host: It is dispatched, so all of its weights are brought to the host first.
    """
    held = []
    for each in placement.tensors(model):
        if each.is_buffer or not each.tensor.is_leaf or each.tensor.grad is None:
            continue
        there = HOST if from_host or lies_on_disk(each.tensor) else str(each.tensor.device)
        if each.storage_device != there and not (each.storage_device == DISK and lies_on_disk(each.tensor)):
            held.append(each)
    if held:
        raise DispatchError(
            f"{held[0].name} holds a gradient (in all {len(held)} weights that are to be moved do): gradients do not "
            "move with weights. Take the optimizer's step first, or call model.zero_grad()"
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


def _refuse_unregistered(model: nn.Module) -> None:
    """Refuse modules with weights on the host that the model keeps in lists, dicts and tuples: as `.to()` does, a map
    reaches registered modules only. Those whose weights are the model's too are right."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, part in model.named_modules():
        for attribute, value in vars(part).items():
            for kept in _modules_in(value) if attribute not in _OF_MODULES else ():
                tensors = [*kept.parameters(), *kept.buffers()]
                left = [each for each in tensors if id(each) not in own and each.device.type == HOST]
                if left and not any(each is part for each in kept.modules()):
                    raise DispatchError(
                        f"{name or type(model).__name__} keeps a {type(kept).__name__} in its attribute {attribute!r}, "
                        f"a {type(value).__name__}: its weights are not the model's, and would stay on the host. Keep "
                        "it in an nn.ModuleList or nn.ModuleDict, or move it to the device that it runs on first"
                    )


def _modules_in(value: object) -> Iterator[nn.Module]:
    """Yield the modules in a plain container, those in containers within it included."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _modules_in(each)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _modules_in(each)


_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that PyTorch's modules have themselves: registered children, parameters, hooks."""


def _is_streamed(each: PlacedTensor) -> bool:
    return each.offloaded and is_accelerator(each.execution_device)
