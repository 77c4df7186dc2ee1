"""Tensors of a checkpoint that become one tensor of the model, or several others, when they are loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import CheckpointMismatchError
from ..sources.headers import TensorEntry


@dataclass(frozen=True)
class Piece:
    """Where one tensor of the checkpoint lies in the tensor it becomes part of.

    Attributes:
        key: the checkpoint's key.
        index: what to index the whole with to get the part; it has the shape of the checkpoint's tensor.
    """

    key: str
    index: tuple[int | slice, ...]


class Fusion:
    """One of transformers' conversions, applied to certain tensors of a checkpoint.

    Args:
        name: the first name in the model that it makes.
        converter: transformers' ``WeightConverter``, unused so far.
        model: the transformers model; conversions ask it for shapes and its config.
    """

    def __init__(self, name: str, converter: Any, model: Any) -> None:
        self.name = name
        self._converter = converter
        self._model = model
        self._parts: dict[str, list[TensorEntry]] = defaultdict(list)
        self._targets: dict[str, torch.Tensor] | None = None

    def add(self, pattern: str, entry: TensorEntry) -> None:
        """Add the tensor that matched the converter's source `pattern`. The order of a pattern's tensors counts."""
        self._parts[pattern].append(entry)
        self._targets = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The checkpoint's tensors that it takes, source pattern by source pattern."""
        return tuple(entry.name for entries in self._parts.values() for entry in entries)

    @property
    def operations(self) -> list[Any]:
        """transformers' operations, in the order in which they are applied."""
        return list(self._converter.operations)

    def targets(self) -> dict[str, torch.Tensor]:
        """What it makes, by the model's names, as tensors on meta.

        Raises:
            CheckpointMismatchError: the tensors do not fit each other.
        """
        if self._targets is None:
            self._targets = self.evaluate(lambda entry: torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        return self._targets

    def evaluate(self, read: Callable[[TensorEntry], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply the conversion to what `read` gives for each tensor; what it makes, by the model's names."""
        converter = deepcopy(self._converter)
        for pattern, entries in self._parts.items():
            for entry in entries:
                converter.add_tensor(self.name, entry.name, pattern, read(entry))
        try:
            made = converter.convert(self.name, model=self._model, config=self._model.config)
        except Exception as error:  # whatever the operations stumble over
            shown = ", ".join(self.keys[:3]) + (", ..." if len(self.keys) > 3 else "")
            raise CheckpointMismatchError(
                f"{self.name} is made from {len(self.keys)} tensors of the checkpoint ({shown}), which do not fit "
                f"together ({error}); some may be missing, or belong to another model"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def pieces(self) -> list[Piece] | None:
        """Where each tensor lies in the one that is made; None unless tensors are merely stacked and concatenated.

        For those that are, it needs no intermediate result, and a part can be read without the rest.
        """
        kinds = [(type(op).__name__, getattr(op, "dim", None)) for op in self._converter.operations]
        parts = [self._parts[p] for p in self._converter.source_patterns if p in self._parts]
        if kinds == [("MergeModulelist", 0)] and len(parts) == 1:
            found = [Piece(entry.name, (i,)) for i, entry in enumerate(parts[0])]
        elif kinds == [("MergeModulelist", 0), ("Concatenate", 1)]:
            found = _stacked_and_concatenated(parts)
        else:
            return None
        return found if self._is_covered_by(found) else None

    def _is_covered_by(self, pieces: list[Piece]) -> bool:
        targets = self.targets()
        if list(targets) != [self.name]:
            return False
        whole = targets[self.name]
        shapes = {entry.name: entry.shape for entries in self._parts.values() for entry in entries}
        return all(whole[piece.index].shape == shapes[piece.key] for piece in pieces) and whole.numel() == sum(
            prod(shape) for shape in shapes.values()
        )


def _stacked_and_concatenated(parts: list[list[TensorEntry]]) -> list[Piece]:
    """Each part's tensors are stacked to a first dimension, then the parts joined along the second."""
    pieces, start = [], 0
    for entries in parts:
        rows = entries[0].shape[0] if entries[0].shape else 0
        pieces += [Piece(entry.name, (i, slice(start, start + rows))) for i, entry in enumerate(entries)]
        start += rows
    return pieces
