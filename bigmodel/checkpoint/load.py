"""Loads a checkpoint into an existing model, on meta or not, also into a model distributed over processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..devices import HOST, DeviceLike
from ..errors import CheckpointError
from ..limits import STAGING_BYTES
from ..profile import normalize_dtype
from ..sources.conversion import Conversion, is_transformers_model
from .checkpoint import Checkpoint
from .device_lookup import DeviceLookup
from .match import TensorLoad, Wanted, match
from .read import Reader

_RUN_DTYPE = "_bigmodel_run_dtype"


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Checkpoint,
    device_map: Mapping[str, DeviceLike] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    read_later: bool = False,
    upload_bytes: int = STAGING_BYTES,
) -> None:
    """Fill `model` from a checkpoint. Either all of it is loaded or, after an exception, nothing is changed.

    Args:
        model: any module; its tensors may be on meta or real. A transformers model takes checkpoints of every layout
            that its own ``from_pretrained`` takes.
        checkpoint: a folder, a ``.safetensors`` or ``.bin`` file, an ``.index.json``, or an open `Checkpoint`.
        device_map: module name -> device; the longest matching name decides. On ``"disk"`` a parameter becomes a view
            of the memory-mapped file: not read, not copied, in the file's dtype. On ``"cpu"`` it is read into memory,
            as pages of the mapped file unless it must be cast. None leaves every tensor on its device, and puts those
            on meta on the CPU.
        offload_folder: folder for tensors on ``"disk"`` that cannot be used in place (fused experts, old ``.bin``
            files). They are written to a file there that is deleted with the model.
        dtype: dtype to which floating-point tensors are cast; None casts to the model's own dtypes. Tensors on disk are
            cast on their execution device: see `run_dtype`.
        offload_state_dict: accepted for compatibility with accelerate; at most one tensor is in memory in addition to
            the model.
        offload_buffers: leave buffers mapped to ``"disk"`` there too, instead of loading them to the CPU.
        keep_in_fp32_modules: names of modules whose parameters are float32 whenever `dtype` is narrower.
        offload_8bit_bnb: not supported, must be False.
        strict: also refuse a checkpoint with unexpected or missing keys (without `strict`, a tensor that has a value
            already may be missing).
        full_state_dict: as for ``torch.distributed.checkpoint.state_dict``; for models of DTensors.
        broadcast_from_rank0: only rank 0 reads, and broadcasts the tensors to the other processes.
        read_later: leave weights on ``"cpu"`` unread in the mapped file where they can be used in place: for a caller
            that pages them in ahead of their use.
        upload_bytes: pinned memory through which tensors reach each accelerator; see `Plan.upload_bytes`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or a file of it is missing.
        CheckpointFormatError: a file is damaged, or not a checkpoint.
        CheckpointMismatchError: the checkpoint does not fit the model: a missing key, a wrong shape, a wrong dtype.
        DeviceMapError: the map does not cover the model, or maps tensors to disk that cannot be used there.
    """
    if offload_8bit_bnb:
        raise CheckpointError("offload_8bit_bnb=True is not supported: bitsandbytes weights stay on their accelerator")
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    if is_distributed_load(model, device_map, broadcast_from_rank0):
        load_distributed(model, opened, strict, full_state_dict, broadcast_from_rank0)
        return
    wanted = Wanted(
        devices=None if device_map is None else DeviceLookup(device_map),
        dtype=None if dtype is None else _torch_dtype(dtype),
        keep_in_fp32_modules=tuple(keep_in_fp32_modules or ()),
        strict=strict,
    )
    loads, conversion = match(model, opened, wanted)
    folder = None if offload_folder is None else Path(offload_folder)
    values = Reader(opened, offload_buffers, folder, read_later, upload_bytes).read(loads)
    _commit(model, loads, values, conversion, in_place=device_map is None)


def run_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a loaded tensor on its execution device; for one on disk it may differ from the file's."""
    dtype = getattr(tensor, _RUN_DTYPE, tensor.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _commit(
    model: nn.Module,
    loads: list[TensorLoad],
    values: dict[str, torch.Tensor],
    conversion: Conversion,
    in_place: bool,
) -> None:
    """Put the values into the model. No step here may fail, so that the model is never changed in part."""
    is_transformers = is_transformers_model(model)
    for load in loads:
        target, value = load.target, values[load.name]
        if in_place and _fits_in(target.tensor, value):
            with torch.no_grad():
                target.tensor.copy_(value)  # keeps the Parameter, which an optimizer may refer to
        else:
            target.fill(value)
        if target.tensor.dtype != load.dtype:
            setattr(target.tensor, _RUN_DTYPE, load.dtype)
        if is_transformers:
            target.tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    if conversion.used is not None:
        model._weight_conversions = conversion.used  # type: ignore[assignment]
    if is_transformers:
        _forget_ties(model, loads)


def _forget_ties(model: Any, loads: list[TensorLoad]) -> None:
    """Remove from transformers' record the ties that the checkpoint contradicts."""
    owner = {name: id(load.target) for load in loads for name in load.target.names}
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    for tied in [tied for tied, first in ties.items() if owner.get(tied) != owner.get(first)]:
        del ties[tied]


def _fits_in(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return not tensor.is_meta and tensor.device == value.device and tensor.dtype == value.dtype


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = normalize_dtype(dtype)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{dtype!r} is not a dtype that torch can compute in; use one such as 'bfloat16'")
    return found


def is_distributed_load(model: nn.Module, device_map: Mapping[str, object] | None, broadcast: bool) -> bool:
    """Return whether loading involves other processes.

    Raises:
        CheckpointError: `broadcast` is set without a process group, or with a device map.
    """
    if broadcast and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise CheckpointError(
            "broadcast_from_rank0=True needs torch.distributed.init_process_group() first; without it every "
            "process reads the checkpoint itself"
        )
    if broadcast and device_map is not None:
        raise CheckpointError("broadcast_from_rank0=True and a device_map exclude each other; leave out one of them")
    return device_map is None and (broadcast or any(_is_distributed(p) for p in model.parameters()))


def load_distributed(
    model: nn.Module, checkpoint: Checkpoint, strict: bool, full_state_dict: bool, broadcast_from_rank0: bool
) -> None:
    """Fill `model` on every process of the group; all must call this.

    Arguments are those of `bigmodel.checkpoint.load_checkpoint_in_model`.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    values: dict[str, Any] = {}
    if not broadcast_from_rank0 or torch.distributed.get_rank() == 0:
        loads, _ = match(model, checkpoint, Wanted(None, None, (), strict))
        on_host = [replace(load, device=HOST) for load in loads]
        read = Reader(checkpoint, offload_buffers=False, offload_folder=None).read(on_host)
        values = {name: read[a.name] for a in loads for name in a.target.names}
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    set_model_state_dict(model, values, options=options)


def _is_distributed(tensor: torch.Tensor) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__) or hasattr(tensor, "_local_tensor")
