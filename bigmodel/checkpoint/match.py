"""Matches a checkpoint to a model: which tensor is loaded where, in which dtype, and which names are tied.

Everything is checked before the model is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointMismatchError
from .checkpoint import Checkpoint
from .conversion import Conversion, Source, convert_keys, is_transformers_model
from .device_lookup import DeviceLookup
from .model_tensors import ModelTensor, find_model_tensors

logger = logging.getLogger(__name__)
_SHOWN = 5


@dataclass(frozen=True)
class TensorLoad:
    """One tensor of a model and its source in the checkpoint.

    Attributes:
        target: the tensor and its places in the model.
        name: the name under which the checkpoint provides it.
        source: what provides it.
        dtype: the dtype it shall run in.
        device: canonical name of where it goes; ``"disk"`` for where it lies.
    """

    target: ModelTensor
    name: str
    source: Source
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for. See `bigmodel.checkpoint.load_checkpoint_in_model`."""

    placement: DeviceLookup | None
    dtype: torch.dtype | None
    keep_in_fp32_modules: Sequence[str]
    strict: bool

    def device(self, target: ModelTensor) -> str:
        """Where the tensors of `target` go; without a map, where they are, from meta to the CPU."""
        if self.placement is None:
            return "cpu" if target.tensor.is_meta else str(target.tensor.device)
        found = self.placement.find(target.name)
        assert found is not None, "the map has been checked"
        return found

    def run_dtype(self, target: ModelTensor, source: Source) -> torch.dtype:
        """The dtype that the tensors of `target` shall have where they run."""
        if self.dtype is None or not source.dtype.is_floating_point or not target.tensor.is_floating_point():
            return target.tensor.dtype
        if self.dtype.itemsize < 4 and any(self._is_within(target.names, kept) for kept in self.keep_in_fp32_modules):
            return torch.float32
        return self.dtype

    @staticmethod
    def _is_within(names: Iterable[str], module: str) -> bool:
        return any(f".{module}." in f".{name}." for name in names)


def match(model: nn.Module, checkpoint: Checkpoint, wanted: Wanted) -> tuple[list[TensorLoad], Conversion]:
    """Find what fills each tensor of `model`. Nothing is changed.

    Raises:
        CheckpointMismatchError: a tensor on meta has nothing to fill it, a shape or dtype does not fit, or, if that
            was asked for, the checkpoint holds what the model has no use for.
        DeviceMapError: the map leaves a tensor without a device.
    """
    targets = tie_as_declared(model, find_model_tensors(model))
    names = {name: target for target in targets if target.persistent for name in target.names}
    conversion = convert_keys(model, names, {name: checkpoint.entry(name) for name in checkpoint})
    targets = untie_what_differs(model, targets, conversion.sources, checkpoint)
    if wanted.placement is not None:
        wanted.placement.check(target.name for target in targets if target.persistent)
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
            return [f"{name} is quantized: {source.dtype}, with a scale {scales[0]} that the model has no use for"]
    return []


def _is_convertible(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether casting keeps the meaning of the values: to the same kind of number, integers only to wider ones."""
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
    if unexpected:
        shown = ", ".join(unexpected[:_SHOWN]) + (", ..." if len(unexpected) > _SHOWN else "")
        logger.warning(
            "%s holds %d tensors that %s has no use for: %s",
            checkpoint.path,
            len(unexpected),
            type(model).__name__,
            shown,
        )


def tie_as_declared(model: nn.Module, targets: list[ModelTensor]) -> list[ModelTensor]:
    """Merge the tensors that a transformers model declares tied, if moving it to meta separated them."""
    if not is_transformers_model(model):
        return targets
    by_name = {name: target for target in targets for name in target.names}
    merged: set[int] = set()
    for tied, kept in _declared_ties(model).items():
        first, second = by_name.get(kept), by_name.get(tied)
        if first is None or second is None or first is second or first.tensor.shape != second.tensor.shape:
            continue
        if first.tensor.is_meta or second.tensor.is_meta:
            first.merge(second)
            merged.add(id(second))
            by_name |= dict.fromkeys(second.names, first)
    return [target for target in targets if id(target) not in merged]


def untie_what_differs(
    model: nn.Module, targets: list[ModelTensor], sources: dict[str, Source], checkpoint: Checkpoint
) -> list[ModelTensor]:
    """Split tied tensors whose names have different values in the checkpoint, as transformers does.

    A checkpoint may hold a tied tensor under each of its names, since ``torch.save`` does; then all must be equal.

    Raises:
        CheckpointMismatchError: they differ, and the model is no transformers model, whose config may be mistaken.
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
            "%s: the config says that %s and %s are tied, but they differ in the checkpoint: they are not tied. "
            "Setting tie_word_embeddings=False in the config says so.",
            checkpoint.path,
            present[0],
            different[0],
        )
        result += [target.split([name]) for name in different]
    return result


def _declared_ties(model: Any) -> dict[str, str]:
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _same(checkpoint: Checkpoint, first: Source, second: Source) -> bool:
    if first.keys == second.keys:
        return True
    if first.shape != second.shape or first.dtype != second.dtype or not (first.in_place and second.in_place):
        return False
    one, other = (checkpoint.tensor(source.keys[0]) for source in (first, second))
    if one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
