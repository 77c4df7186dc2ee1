"""Inspecting models, and removing their wrappers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigmodel.errors import TrainError
from bigmodel.train.state.partial import PartialState
from bigmodel.train.wrappers import bare_model


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model inside DistributedDataParallel, a DeepSpeed engine and compilation.

    Args:
        keep_fp32_wrapper: keep its mixed precision forward; otherwise restore the original one.
        keep_torch_compile: keep it compiled.
        recursive: also unwrap the model's children, in place.
    """
    inner = bare_model(model, _without_wrapper, keep_fp32_wrapper, keep_torch_compile)
    if recursive:
        for name, child in list(inner.named_children()):
            unwrapped = extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive=True)
            if unwrapped is not child:
                setattr(inner, name, unwrapped)
    return inner


def _without_wrapper(model: nn.Module) -> nn.Module:
    wrappers: tuple[type, ...] = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrappers) or type(model).__name__ == "DeepSpeedEngine":
        inner = model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model


def is_compiled_module(module: nn.Module) -> bool:
    """Whether this module was returned by `torch.compile`."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether any submodule is compiled separately."""
    return any(getattr(part, "_compiled_call_impl", None) is not None for part in module.modules())


def is_peft_model(model: nn.Module) -> bool:
    """Whether the model, without its wrappers, is a PEFT model."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(extract_model_from_parallel(model), PeftModel)


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter is sharded among processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module by name.

    Args:
        recurse: also those of its children.
        remove_non_persistent: leave out buffers that are not part of the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        kept = set(module.state_dict()) if remove_non_persistent else None
        for name, buffer in module.named_buffers(recurse=recurse):
            if kept is None or name in kept:
                yield name, buffer


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: torch.device | str | int,
    value: Tensor | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
) -> None:
    """Move a parameter or buffer of a module to a device, with new values if `value` is given.

    Args:
        tensor_name: its name, with dots for those of children.
        value: of the same shape. A tensor on the meta device needs one.
        dtype: its new dtype; by default, its dtype does not change.

    Raises:
        TrainError: there is no such tensor, the shapes differ, or a meta tensor is moved without `value`.
    """
    owner_name, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(owner_name)
    old = owner._parameters.get(name, owner._buffers.get(name))
    if old is None:
        raise TrainError(f"{type(module).__name__} has no parameter or buffer {tensor_name!r}")
    if value is not None and value.shape != old.shape:
        raise TrainError(f"{tensor_name} has shape {tuple(old.shape)}, the value {tuple(value.shape)}")
    if value is None and old.is_meta:
        raise TrainError(f"{tensor_name} is on the meta device and has no data to move; pass `value`")
    with torch.no_grad():
        new = (old if value is None else value).to(device, dtype or old.dtype, non_blocking=non_blocking)
    if name in owner._parameters:
        owner._parameters[name] = nn.Parameter(new.detach(), requires_grad=old.requires_grad)
    else:
        owner._buffers[name] = new


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return the identity of a tensor's storage: device, address and size in bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def wait_for_everyone() -> None:
    """Wait until every process has called this function."""
    PartialState().wait_for_everyone()
