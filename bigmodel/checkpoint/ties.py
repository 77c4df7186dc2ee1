"""Which names of a model are to be one tensor when a checkpoint is loaded into it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointMismatchError
from .checkpoint import Checkpoint
from .conversion import Source, is_transformers_model
from .slots import Slot

logger = logging.getLogger(__name__)


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
