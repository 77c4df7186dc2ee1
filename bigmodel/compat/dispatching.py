"""Dispatching a model as accelerate's functions do (`big_modeling`), with what callers rely on beside the placement.

They are this package's own, and in addition: modules show hooks (`hooks.dispatched`), entries of an offload index may
name a dtype, and buffers are filled from it too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import dispatch
from ..checkpoint import Checkpoint
from ..devices import DeviceLike
from ..dispatch.attach.dispatched import accelerators_first, dispatched
from ..dispatch.dispatch import place_and_attach
from ..dispatch.load import load_checkpoint_and_dispatch as load_and_dispatch
from ..dispatch.placement.offload_files import fill_meta
from ..dispatch.placement.options import Options, PlanArguments
from ..dispatch.placement.resolve import DeviceMap, ResolvedMap, resolve_device_map, whole_classes
from ..dispatch.weights.parameters import like
from .hooks.dispatched import show_hooks
from .offload_files import INDEX, Entry, OffloadedWeightsLoader, stored_tensor, wanted_dtype


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: DeviceLike | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Entry] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    **arguments: Any,
) -> nn.Module:
    """Distribute `model` over devices as `bigmodel.dispatch_model` does, and let its modules show hooks.

    Args:
        offload_dir: Also a folder of `offload_state_dict`, to fill parameters on ``meta`` from.
        offload_index: Where parameters and buffers on ``meta`` lie, and perhaps the dtype to which they are cast.
        arguments: Further ones of `bigmodel.dispatch_model`.
    """
    import bigmodel.big_modeling as public  # callers may have replaced its check_device_map

    if isinstance(device_map, Mapping):
        public.check_device_map(model, device_map)
    dtype = cast_on_device(model, offload_index)
    fill_from_index(model, offload_index, offload_dir, leave_uncast=dtype is not None)
    if offload_index:
        classes = whole_classes(model, arguments.pop("no_split_module_classes", None), preload_module_classes)
        sample_inputs = arguments.pop("sample_inputs", None)
        plan_arguments = PlanArguments.read(
            main_device=main_device,
            no_split_module_classes=classes,
            offload_buffers=offload_buffers,
            dtype=dtype,
            **arguments,
        )
        fill_meta(model, state_dict)
        dispatch_as_stored(
            model,
            resolve_device_map(model, device_map, plan_arguments, sample_inputs=sample_inputs),
            Options(skip_keys=skip_keys, no_split_module_classes=classes, force_hooks=force_hooks),
            offload_dir,
        )
    else:
        dispatch.dispatch_model(
            model,
            device_map,
            main_device,
            state_dict,
            offload_dir,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            force_hooks=force_hooks,
            **arguments,
        )
    if isinstance(device_map, Mapping):
        model.__dict__["hf_device_map"] = accelerators_first(device_map)
    return with_hooks(model)


def dispatch_as_stored(
    model: nn.Module, resolved: ResolvedMap, options: Options, offload_dir: str | Path | None = None
) -> None:
    """Dispatch a model whose weights view the files of an offload index; the host computes with them where they lie.

    transformers' own models compute with weights as their files align them. Aligned copies would give other last bits
    than those, and take the host's memory a second time.
    """
    place_and_attach(model, resolved, replace(options, align_memory=False), offload_dir)


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all weights on the host, as `bigmodel.cpu_offload` does, and let modules show hooks."""
    dispatch.cpu_offload(model, execution_device, offload_buffers, state_dict, preload_module_classes)
    return with_hooks(model)


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all weights on disk, as `bigmodel.disk_offload` does, and let modules show hooks."""
    fill_from_index(model, None, offload_dir)
    Path(offload_dir).mkdir(parents=True, exist_ok=True)
    dispatch.disk_offload(model, offload_dir, execution_device, offload_buffers, preload_module_classes)
    return with_hooks(model)


def load_checkpoint_and_dispatch(model: nn.Module, checkpoint: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Load a checkpoint and dispatch as `bigmodel.load_checkpoint_and_dispatch` does, and let modules show hooks."""
    load_and_dispatch(model, checkpoint, *args, **kwargs)
    return with_hooks(model) if dispatched(model) is not None else model


def fill_from_index(
    model: nn.Module,
    index: Mapping[str, Entry] | None,
    folder: str | Path | None,
    leave_uncast: bool = False,
) -> None:
    """Fill tensors on ``meta`` from the files that `index` names, or from a folder of `offload_state_dict`.

    A tied weight is filled under all of its names if one of them is there.

    A tensor whose entry names another dtype than the file has is cast, unless `leave_uncast`: then it views the file.
    """
    stored = None
    if folder is not None and (Path(folder) / INDEX).is_file():
        stored = OffloadedWeightsLoader(save_folder=folder)
    opened: dict[str, Checkpoint] = {}
    filled: dict[tuple[Any, ...], torch.Tensor] = {}
    empty: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    values: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            for key, tensor in registry.items():
                if tensor is None or not tensor.is_meta:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                entry = (index or {}).get(name)
                if entry is not None and entry.get("safetensors_file") is not None:
                    identity = (entry["safetensors_file"], entry.get("weight_name", name), type(tensor))
                    if identity not in filled:  # tied weights stay one
                        value = stored_tensor(name, entry, opened)
                        wanted = value.dtype if leave_uncast else wanted_dtype(entry, value)
                        filled[identity] = like(tensor, value.to(wanted))
                    registry[key] = filled[identity]
                elif stored is not None and name in stored:
                    registry[key] = like(tensor, stored[name])
                if registry[key] is tensor:
                    empty.append((registry, key, tensor))
                else:
                    values.setdefault(id(tensor), registry[key])
    for registry, key, tensor in empty:
        registry[key] = values.get(id(tensor), tensor)


def cast_on_device(model: nn.Module, index: Mapping[str, Entry] | None) -> torch.dtype | None:
    """Return the dtype to which all weights of `model` are cast where they run, for a model whose index names one dtype
    for all weights and another than the files have; None if nothing is cast, or weights have several dtypes.
    """
    opened: dict[str, Checkpoint] = {}
    stored, wanted = set(), {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    for name, entry in (index or {}).items():
        if entry.get("safetensors_file") is not None:
            value = stored_tensor(name, entry, opened)
            if value.is_floating_point():
                stored.add(value.dtype)
                wanted.add(wanted_dtype(entry, value))
    return wanted.pop() if len(wanted) == 1 and stored - wanted else None


def with_hooks(model: nn.Module) -> nn.Module:
    """Let the modules of a dispatched model show hooks, now and after it is dispatched again."""
    found = dispatched(model)
    assert found is not None
    found.options = replace(found.options, observer=show_hooks)
    found.observe(model)
    return model
