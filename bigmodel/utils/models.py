"""Inspecting models, and removing their wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigmodel.devices import torch_device
from bigmodel.dispatch.weights.parameters import like
from bigmodel.errors import CheckpointMismatchError

# What few of these functions need is imported in them: transformers imports this module with its first model.


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model inside DistributedDataParallel, a DeepSpeed engine and compilation.

    Args:
        keep_fp32_wrapper: keep its mixed precision forward; otherwise restore the original one.
        keep_torch_compile: keep it compiled.
        recursive: also unwrap the model's children, in place.
    """
    from bigmodel.train.wrappers import bare_model

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
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else ()
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in left_out:
                yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that are not part of the state dict.

    Args:
        recurse: also those of its children.
        fqns: with the names of the children before them.
    """
    parts = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, part in parts
        for name in part._non_persistent_buffers_set
    }


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: torch.device | str | int,
    value: Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer of a module to a device, with new values if `value` is given.

    Args:
        tensor_name: its name, with dots for those of children.
        value: of the same shape. A tensor on the meta device needs one.
        dtype: its new dtype, for floating-point values; by default, its dtype does not change.
        fp16_statistics: the scales of a parameter of 8-bit integers, kept as its attribute ``SCB``.
        tied_params_map: for each address of a tied weight, its copy on each device: a copy that is there is used, a new
            one is added.
        clear_cache: accepted for compatibility with accelerate; the device's cached memory is always kept.

    Raises:
        CheckpointMismatchError: there is no such tensor, the shapes differ, or a meta tensor is moved without `value`.
    """
    owner_name, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(owner_name)
    registry: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    old = registry.get(name)
    if old is None:
        raise CheckpointMismatchError(f"{type(module).__name__} has no parameter or buffer {tensor_name!r}")
    target = torch_device(device)
    copies = (tied_params_map or {}).get((old if value is None else value).data_ptr()) if tied_params_map else None
    if copies is not None and target in copies:
        registry[name] = copies[target]
        return
    if value is not None and value.shape != old.shape and type(old).__name__ != "Params4bit":
        raise CheckpointMismatchError(
            f'Trying to set a tensor of shape {value.shape} in "{name}" (which has shape {old.shape}), this looks '
            "incorrect."
        )
    if value is None and old.is_meta and target.type != "meta":
        raise CheckpointMismatchError(
            f"{tensor_name} is on the meta device and has no data to move to {target}; pass `value`"
        )
    source = old if value is None else value
    with torch.no_grad():
        moved = source.detach().to(target, _dtype_for(source, old, dtype), non_blocking=non_blocking)
    registry[name] = new = like(old, moved)
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
    if copies is not None:
        copies[target] = new


def _dtype_for(value: Tensor, old: Tensor, dtype: torch.dtype | str | None) -> torch.dtype:
    if dtype is None:
        return old.dtype
    from bigmodel.profile.model.tensors import torch_dtype

    return torch_dtype(dtype) if value.is_floating_point() else value.dtype


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return the identity of a tensor's storage: device, address and size in bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def wait_for_everyone() -> None:
    """Wait until every process has called this function."""
    from bigmodel.train.state.partial import PartialState

    PartialState().wait_for_everyone()
