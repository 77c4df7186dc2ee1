"""Adds `AlignDevicesHook` to the modules of a model, by accelerate's rules which of them get one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from ...devices import DeviceLike
from ..offload_files import PrefixedDataset
from .align import AlignDevicesHook, TiedCopies
from .model_hook import HOOK, add_hook_to_module


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Add a hook to `module` and to all modules in it that moves their inputs to `execution_device`.

    Modules that have a hook, or no weights at all, get none.

    Args:
        preload_module_classes: Classes whose parts get none.
    """
    if not hasattr(module, HOOK) and len(module.state_dict(keep_vars=True)) > 0:
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Add a hook to each module in `module` that holds parameters or buffers itself.

    Args:
        weights_map: The values of offloaded weights, by their names in the whole model.
        module_name: The name of `module` in the whole model.
        preload_module_classes: Classes whose weights are brought all at once, with those of their parts.
    """
    whole = offload and type(module).__name__ in (preload_module_classes or ())
    has_tensors = any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
    if whole or has_tensors:
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device=execution_device,
            offload=offload,
            weights_map=weights_map,
            offload_buffers=offload_buffers,
            module_name=f"{module_name}.{name}" if module_name else name,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, DeviceLike | None] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Add hooks block by block: each block has its own execution device, and is offloaded or not.

    Args:
        execution_device: One device, or that of each block by name.
        offload: For all blocks, or for each by name.
    """
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module, execution_device, True, weights_map, offload_buffers, module_name, skip_keys,
                tied_params_map=tied_params_map,
            )  # fmt: skip
        else:
            hook = AlignDevicesHook(
                execution_device, io_same_device=True, skip_keys=skip_keys, place_submodules=True,
                tied_params_map=tied_params_map,
            )  # fmt: skip
            add_hook_to_module(module, hook)
        return
    devices, offloads = _by_block(execution_device, offload)
    is_root = module_name == ""
    if module_name in devices and module_name in offloads:
        device = devices[module_name]
        if offloads[module_name]:
            attach_align_device_hook(
                module, device, True, weights_map, offload_buffers, module_name, skip_keys, preload_module_classes,
                tied_params_map,
            )  # fmt: skip
        if not offloads[module_name] or not hasattr(module, HOOK):
            hook = AlignDevicesHook(
                device, io_same_device=is_root, skip_keys=skip_keys, place_submodules=not offloads[module_name],
                tied_params_map=tied_params_map,
            )  # fmt: skip
            add_hook_to_module(module, hook)
        preloaded = preload_module_classes if offloads[module_name] else None
        attach_execution_device_hook(module, device, skip_keys, preloaded, tied_params_map)
    elif is_root:
        hook = AlignDevicesHook(
            devices.get(""), io_same_device=True, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(module, hook)
    for name, child in module.named_children():
        attach_align_device_hook_on_blocks(
            child,
            devices,
            offloads,
            weights_map=weights_map,
            offload_buffers=offload_buffers,
            module_name=name if is_root else f"{module_name}.{name}",
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=tied_params_map,
        )


def _by_block(
    execution_device: DeviceLike | Mapping[str, DeviceLike | None] | None, offload: bool | Mapping[str, bool]
) -> tuple[Mapping[str, DeviceLike | None], Mapping[str, bool]]:
    if isinstance(execution_device, Mapping):
        return execution_device, offload if isinstance(offload, Mapping) else dict.fromkeys(execution_device, offload)
    assert isinstance(offload, Mapping)
    return dict.fromkeys(offload, execution_device), offload
