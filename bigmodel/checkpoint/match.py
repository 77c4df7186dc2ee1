"""Matches a checkpoint to a model: source, device and dtype of each tensor, and which names are tied.

Everything is checked before the model is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointMismatchError
from ..profile.model.stage import PASSED
from ..quantized.stored import published, stored_names
from ..sources.conversion import Conversion, TensorSource, convert_keys, is_transformers_model
from .checkpoint import Checkpoint
from .device_lookup import DeviceLookup
from .model_tensors import ModelTensor, find_model_tensors

logger = logging.getLogger(__name__)
_SHOWN = 5


@dataclass(frozen=True)
class TensorLoad:
    """One tensor of a model and its source in the checkpoint.

    Attributes:
        target: the tensor and its places in the model.
        name: the name, of those it has in the model, that the checkpoint provides.
        source: the checkpoint tensors that provide it.
        dtype: its dtype on its execution device.
        device: canonical name of its device; ``"disk"`` leaves it in its file.
    """

    target: ModelTensor
    name: str
    source: TensorSource
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Wanted:
    """Arguments of a load; see `bigmodel.checkpoint.load_checkpoint_in_model`."""

    devices: DeviceLookup | None
    dtype: torch.dtype | None
    keep_in_fp32_modules: Sequence[str]
    strict: bool
    as_stored: frozenset[str] = frozenset()
    """Names of tensors that are never cast."""

    def device(self, target: ModelTensor) -> str:
        """Return the device of `target`; without a map, its present device, or the CPU if it is on meta."""
        if self.devices is None:
            return "cpu" if target.tensor.is_meta else str(target.tensor.device)
        found = self.devices.find(target.name)
        assert found is not None, "the map has been checked"
        return found

    def run_dtype(self, target: ModelTensor, source: TensorSource) -> torch.dtype:
        """Return the dtype of `target` on its execution device."""
        if self.dtype is None or not source.dtype.is_floating_point or not target.tensor.is_floating_point():
            return target.tensor.dtype
        if target.name in self.as_stored:
            return target.tensor.dtype
        if self.dtype.itemsize < 4 and any(self._is_within(target.names, name) for name in self.keep_in_fp32_modules):
            return torch.float32
        return self.dtype

    @staticmethod
    def _is_within(names: Iterable[str], module: str) -> bool:
        return any(f".{module}." in f".{name}." for name in names)


def match(model: nn.Module, checkpoint: Checkpoint, wanted: Wanted) -> tuple[list[TensorLoad], Conversion]:
    """Find the source of each tensor of `model`. Nothing is changed.

    Raises:
        CheckpointMismatchError: a tensor on meta has no source, a shape or dtype does not fit, or, with
            `Wanted.strict`, the checkpoint has unexpected keys.
        DeviceMapError: the map leaves a tensor without a device.
    """
    wanted = replace(wanted, as_stored=stored_names(model))
    targets = tie_as_declared(model, find_model_tensors(model))
    names = {name: target for target in targets if target.persistent for name in target.names}
    found = published(model)
    known = None if found is None else found.sources
    conversion = convert_keys(model, names, {name: checkpoint.entry(name) for name in checkpoint}, known)
    targets = untie_what_differs(model, targets, conversion.sources, checkpoint)
    if wanted.devices is not None:
        wanted.devices.check(target.name for target in targets if target.persistent)
    problems: list[str] = []
    loads = []
    for target in targets:
        name = next((name for name in target.names if name in conversion.sources), None)
        if name is None:
            problems += _missing(target, wanted.strict)
            continue
        source = conversion.sources[name]
        load = TensorLoad(target, name, source, wanted.run_dtype(target, source), wanted.device(target))
        problems += _misfits(load, conversion.unexpected)
        loads.append(load)
    if wanted.strict:
        problems += [f"{key} is not in the model" for key in conversion.unexpected]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointMismatchError(
            f"{checkpoint.path} does not fit {type(model).__name__}: {'; '.join(problems[:_SHOWN])}{more}. "
            "Nothing was loaded; check that the checkpoint and the model's config belong together"
        )
    _warn_of(conversion.unexpected, checkpoint, model)
    return loads, conversion


def _missing(target: ModelTensor, strict: bool) -> list[str]:
    if target.tensor.is_meta:
        if target.persistent:
            return [f"{target.name} is not in the checkpoint and has no value in the model"]
        return [
            f"the buffer {target.name} is on meta and never saved: build the model with bigmodel.init_empty_weights(), "
            "which leaves buffers real"
        ]
    return [f"{target.name} is not in the checkpoint"] if strict and target.persistent else []


def _misfits(load: TensorLoad, unexpected: list[str]) -> list[str]:
    name, source, tensor = load.name, load.source, load.target.tensor
    if tuple(tensor.shape) != source.shape:
        return [f"{name} has shape {source.shape} in the checkpoint and {tuple(tensor.shape)} in the model"]
    if not _is_convertible(source.dtype, load.dtype):
        return [f"{name} is {source.dtype} in the checkpoint and {tensor.dtype} in the model"]
    if source.dtype.is_floating_point and source.dtype.itemsize == 1 and load.dtype.itemsize > 1:
        owner = name.rpartition(".")[0]
        scales = [key for key in unexpected if key.startswith(f"{owner}.") and "scale" in key]
        if scales:
            return [f"{name} is quantized: {source.dtype}, with a scale {scales[0]} that the model does not use"]
    return []


def _is_convertible(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast preserves the kind of number; integers may only become wider."""
    if source == target:
        return True
    if source.is_floating_point and target.is_floating_point:
        return True
    kinds = {source.is_floating_point, target.is_floating_point, source.is_complex, target.is_complex}
    if True in kinds or torch.bool in (source, target):
        return False
    low, high = torch.iinfo(source), torch.iinfo(target)
    return high.min <= low.min and low.max <= high.max


def _warn_of(unexpected: list[str], checkpoint: Checkpoint, model: nn.Module) -> None:
    elsewhere = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, PASSED))
    unexpected = [name for name in unexpected if not name.startswith(elsewhere)]
    if unexpected:
        shown = ", ".join(unexpected[:_SHOWN]) + (", ..." if len(unexpected) > _SHOWN else "")
        logger.warning(
            "%d tensors of %s were not used when loading %s: %s",
            len(unexpected),
            checkpoint.path,
            type(model).__name__,
            shown,
        )


def tie_as_declared(model: nn.Module, targets: list[ModelTensor]) -> list[ModelTensor]:
    """Merge tensors that a transformers model declares tied, if moving it to meta has untied them."""
    if not is_transformers_model(model):
        return targets
    by_name = {name: target for target in targets for name in target.names}
    merged: set[int] = set()
    for tied, original in _declared_ties(model).items():
        first, second = by_name.get(original), by_name.get(tied)
        if first is None or second is None or first is second or first.tensor.shape != second.tensor.shape:
            continue
        if first.tensor.is_meta or second.tensor.is_meta:
            first.merge(second)
            merged.add(id(second))
            by_name |= dict.fromkeys(second.names, first)
    return [target for target in targets if id(target) not in merged]


def untie_what_differs(
    model: nn.Module, targets: list[ModelTensor], sources: dict[str, TensorSource], checkpoint: Checkpoint
) -> list[ModelTensor]:
    """Split tied tensors whose names have different values in the checkpoint, as transformers does.

    A checkpoint may hold a tied tensor under each of its names, since ``torch.save`` does; then all must be equal.

    Raises:
        CheckpointMismatchError: they differ, and the model is not a transformers model. (The config of a transformers
            model may declare ties that its checkpoint does not have.)
    """
    result = []
    for target in targets:
        result.append(target)
        present = [name for name in target.names if name in sources]
        different = [n for n in present[1:] if not _same(checkpoint, sources[present[0]], sources[n])]
        if not different:
            continue
        if not is_transformers_model(model):
            raise CheckpointMismatchError(
                f"{checkpoint.path}: {present[0]} and {different[0]} are one parameter of the model, but differ in "
                "the checkpoint; untie them in the model, or remove one of them from the checkpoint"
            )
        logger.warning(
            "%s: the config declares %s and %s tied, but they differ in the checkpoint, so they are loaded untied; "
            "set tie_word_embeddings=False in the config",
            checkpoint.path,
            present[0],
            different[0],
        )
        result += [target.split([name]) for name in different]
    return result


def _declared_ties(model: Any) -> dict[str, str]:
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _same(checkpoint: Checkpoint, first: TensorSource, second: TensorSource) -> bool:
    if first.keys == second.keys:
        return True
    if first.shape != second.shape or first.dtype != second.dtype or not (first.in_place and second.in_place):
        return False
    one, other = (checkpoint.tensor(source.keys[0]) for source in (first, second))
    if one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
