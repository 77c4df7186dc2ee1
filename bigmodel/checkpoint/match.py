"""What goes where: a checkpoint against a model, checked as a whole before anything is touched.

Which names of a model are to be one tensor when a checkpoint is loaded into it.
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
from .device_lookup import Placement
from .model_tensors import Slot, find_slots

logger = logging.getLogger(__name__)
_SHOWN = 5


@dataclass(frozen=True)
class Assignment:
    """One tensor of a model and what the checkpoint has for it.

    Attributes:
        slot: the tensor and its places in the model.
        name: the name under which the checkpoint provides it.
        source: what provides it.
        dtype: the dtype it shall run in.
        device: canonical name of where it goes; ``"disk"`` for where it lies.
    """

    slot: Slot
    name: str
    source: Source
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for. See `bigmodel.checkpoint.load_checkpoint_in_model`."""

    placement: Placement | None
    dtype: torch.dtype | None
    keep_in_fp32_modules: Sequence[str]
    strict: bool

    def device(self, slot: Slot) -> str:
        """Where the tensors of `slot` go; without a map, where they are, from meta to the CPU."""
        if self.placement is None:
            return "cpu" if slot.tensor.is_meta else str(slot.tensor.device)
        found = self.placement.find(slot.name)
        assert found is not None, "the map has been checked"
        return found

    def run_dtype(self, slot: Slot, source: Source) -> torch.dtype:
        """The dtype that the tensors of `slot` shall have where they run."""
        if self.dtype is None or not source.dtype.is_floating_point or not slot.tensor.is_floating_point():
            return slot.tensor.dtype
        if self.dtype.itemsize < 4 and any(self._is_within(slot.names, kept) for kept in self.keep_in_fp32_modules):
            return torch.float32
        return self.dtype

    @staticmethod
    def _is_within(names: Iterable[str], module: str) -> bool:
        return any(f".{module}." in f".{name}." for name in names)


def match(model: nn.Module, checkpoint: Checkpoint, wanted: Wanted) -> tuple[list[Assignment], Conversion]:
    """Find what fills each tensor of `model`. Nothing is changed.

    Raises:
        CheckpointMismatchError: a tensor on meta has nothing to fill it, a shape or dtype does not fit, or, if that
            was asked for, the checkpoint holds what the model has no use for.
        DeviceMapError: the map leaves a tensor without a device.
    """
    slots = tie_as_declared(model, find_slots(model))
    names = {name: slot for slot in slots if slot.persistent for name in slot.names}
    conversion = convert_keys(model, names, {name: checkpoint.entry(name) for name in checkpoint})
    slots = untie_what_differs(model, slots, conversion.sources, checkpoint)
    if wanted.placement is not None:
        wanted.placement.check(slot.name for slot in slots if slot.persistent)
    problems: list[str] = []
    assignments = []
    for slot in slots:
        name = next((name for name in slot.names if name in conversion.sources), None)
        if name is None:
            problems += _missing(slot, wanted.strict)
            continue
        source = conversion.sources[name]
        assignment = Assignment(slot, name, source, wanted.run_dtype(slot, source), wanted.device(slot))
        problems += _misfits(assignment, conversion.unexpected)
        assignments.append(assignment)
    if wanted.strict:
        problems += [f"{key} is not in the model" for key in conversion.unexpected]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointMismatchError(
            f"{checkpoint.path} does not fit {type(model).__name__}: {'; '.join(problems[:_SHOWN])}{more}. "
            "Nothing was loaded; check that the checkpoint and the model's config belong together"
        )
    _warn_of(conversion.unexpected, checkpoint, model)
    return assignments, conversion


def _missing(slot: Slot, strict: bool) -> list[str]:
    if slot.tensor.is_meta:
        if slot.persistent:
            return [f"{slot.name} is not in the checkpoint and has no value in the model"]
        return [
            f"the buffer {slot.name} is on meta and never saved: build the model with bigmodel.init_empty_weights(), "
            "which leaves buffers real"
        ]
    return [f"{slot.name} is not in the checkpoint"] if strict and slot.persistent else []


def _misfits(assignment: Assignment, unexpected: list[str]) -> list[str]:
    name, source, tensor = assignment.name, assignment.source, assignment.slot.tensor
    if tuple(tensor.shape) != source.shape:
        return [f"{name} has shape {source.shape} in the checkpoint and {tuple(tensor.shape)} in the model"]
    if not _is_convertible(source.dtype, assignment.dtype):
        return [f"{name} is {source.dtype} in the checkpoint and {tensor.dtype} in the model"]
    if source.dtype.is_floating_point and source.dtype.itemsize == 1 and assignment.dtype.itemsize > 1:
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


def tie_as_declared(model: nn.Module, slots: list[Slot]) -> list[Slot]:
    """Merge slots that a transformers model says are tied, where it has come apart on its way to meta."""
    if not is_transformers_model(model):
        return slots
    by_name = {name: slot for slot in slots for name in slot.names}
    merged: set[int] = set()
    for tied, kept in _declared_ties(model).items():
        first, second = by_name.get(kept), by_name.get(tied)
        if first is None or second is None or first is second or first.tensor.shape != second.tensor.shape:
            continue
        if first.tensor.is_meta or second.tensor.is_meta:
            first.merge(second)
            merged.add(id(second))
            by_name |= dict.fromkeys(second.names, first)
    return [slot for slot in slots if id(slot) not in merged]


def untie_what_differs(
    model: nn.Module, slots: list[Slot], sources: dict[str, Source], checkpoint: Checkpoint
) -> list[Slot]:
    """Split the slots whose names the checkpoint gives different values, as transformers does.

    A checkpoint may hold a tied tensor under each of its names, since ``torch.save`` does; then all must be equal.

    Raises:
        CheckpointMismatchError: they differ, and the model is no transformers model, whose config may be mistaken.
    """
    result = []
    for slot in slots:
        result.append(slot)
        present = [name for name in slot.names if name in sources]
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
        result += [slot.split([name]) for name in different]
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
