"""Load a checkpoint into a model and dispatch it, in one step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from ..devices import DeviceLike
from ..profile.model.tensors import torch_dtype
from ..profile.trace.dry_run import SampleInputs
from .dispatch import place_and_attach
from .placement.fused_checkpoint import load_in_place
from .placement.options import Options, PlanArguments, dtype_of
from .placement.resolve import DeviceMap, resolve_device_map, whole_classes
from .placement.stored_weights import hold_as_stored


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: DeviceMap | None = None,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    main_device: DeviceLike | None = None,
    expert_cache: int | str | None = None,
    pinned_memory: int | str | None = None,
    offload: str | None = None,
    offload_dtype: str | None = None,
    host_kernels: str | None = None,
    sample_inputs: SampleInputs | None = None,
) -> nn.Module:
    """Load `checkpoint` into `model` by a device map, and dispatch it.

    Weights mapped to ``"disk"`` are not read: they become views of the memory-mapped checkpoint. Weights that the
    checkpoint stores quantised, by the ``config.json`` beside it, stay as stored: `model` then has the modules for it.

    Args:
        model: Any module; usually built within `init_empty_weights`.
        checkpoint: A folder, a safetensors or ``.bin`` file, or an index file.
        device_map: As for `dispatch_model`. None only loads.
        max_memory: Budgets by device, for the named strategies.
        no_split_module_classes: Classes whose modules are never split; None detects them.
        offload_folder: Folder for weights mapped to ``"disk"`` that cannot be used in place (fused or ``.bin`` ones).
        offload_buffers: Stream the buffers of offloaded modules too.
        dtype: Dtype of floating-point weights on their execution device. Weights on disk keep the file's dtype.
        offload_state_dict: Accepted for compatibility; loading holds at most one tensor in addition to the model.
        skip_keys: Keyword arguments of forward that are not moved between devices.
        preload_module_classes: More classes whose weights are streamed as a whole.
        force_hooks: As for `dispatch_model`.
        strict: Refuse keys that the model does not have.
        full_state_dict: As for `load_checkpoint_in_model`.
        broadcast_from_rank0: As for `load_checkpoint_in_model`.
        main_device: Execution device of offloaded modules.
        expert_cache: As for `dispatch_model`.
        pinned_memory: As for `dispatch_model`.
        offload: As for `dispatch_model`.
        offload_dtype: As for `dispatch_model`.
        host_kernels: As for `dispatch_model`.
        sample_inputs: As for `dispatch_model`.

    Returns:
        The same `model`.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or does not fit the model, which is left unchanged.
        PlanError: The map does not cover the model, the model does not fit the budgets, or an argument is invalid.
    """
    wanted = None if dtype is None else torch_dtype(dtype)
    hold_as_stored(model, checkpoint, wanted)
    classes = whole_classes(model, no_split_module_classes, preload_module_classes)
    resolved = None
    if device_map is not None:
        arguments = PlanArguments.read(
            main_device=main_device,
            max_memory=max_memory,
            no_split_module_classes=classes,
            offload=offload,
            offload_buffers=offload_buffers,
            offload_dtype=offload_dtype,
            host_kernels=host_kernels,
            expert_cache=expert_cache,
            pinned_memory=pinned_memory,
            dtype=wanted,
        )
        resolved = resolve_device_map(model, device_map, arguments, sample_inputs=sample_inputs)
    load_in_place(
        model,
        checkpoint,
        device_map=None if resolved is None else resolved.keys,
        offload_folder=offload_folder,
        dtype=wanted if resolved is None else dtype_of(resolved.plan),
        offload_buffers=bool(offload_buffers) if resolved is None else resolved.plan.offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
        read_later=resolved is not None and resolved.reads_ahead,
        **({} if resolved is None else {"upload_bytes": resolved.plan.upload_bytes}),
    )
    if resolved is None:
        return model
    options = Options(skip_keys=skip_keys, no_split_module_classes=classes, force_hooks=force_hooks)
    return place_and_attach(model, resolved, options, offload_folder)
