"""States of fixed size, which layers of some kinds have in the place of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class LayerState:
    """State of one layer after some tokens of one sequence: one row of tensors that hold those of several.

    Attributes:
        conv: Last inputs of its convolutions [sequences, width, kernel size], by number; None for one without.
        recurrent: Its recurrent states [sequences, ...], likewise.
        kernels: Sizes of the convolutions' kernels.
        row: The sequence's row.
        sequences: How many sequences have rows; those behind theirs are padding.
    """

    conv: tuple[torch.Tensor | None, ...]
    recurrent: tuple[torch.Tensor | None, ...]
    kernels: tuple[int | None, ...]
    row: int = 0
    sequences: int = 1

    @property
    def rows(self) -> int:
        """Number of rows of the tensors."""
        return max(len(each) for each in (*self.conv, *self.recurrent) if each is not None)

    def copy(self) -> LayerState:
        """A state of its own, with tensors of one row."""
        conv, recurrent = (
            tuple(None if each is None else each[self.row : self.row + 1].clone() for each in kept)
            for kept in (self.conv, self.recurrent)
        )
        return LayerState(conv, recurrent, self.kernels)

    def times(self, factor: float) -> LayerState:
        """The state with recurrent states that are so much larger."""
        own = self.copy()
        return LayerState(
            own.conv, tuple(None if each is None else each * factor for each in own.recurrent), own.kernels
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """The sequence's own part of each tensor."""
        for tensor in (*self.conv, *self.recurrent):
            if tensor is not None:
                yield tensor[self.row]


class StateBytes(NamedTuple):
    """Bytes of a sequence's states.

    Attributes:
        total: Those of all layers, by device.
        largest: Those of the layer with most, by device.
    """

    total: Mapping[str, int]
    largest: Mapping[str, int]

    @classmethod
    def of(cls, states: Mapping[int, LayerState]) -> StateBytes:
        """The bytes of states, by layer."""
        total: dict[str, int] = {}
        largest: dict[str, int] = {}
        for state in states.values():
            of_layer: dict[str, int] = {}
            for tensor in state.tensors():
                of_layer[str(tensor.device)] = of_layer.get(str(tensor.device), 0) + tensor.nbytes
            for device, nbytes in of_layer.items():
                total[device] = total.get(device, 0) + nbytes
                largest[device] = max(largest.get(device, 0), nbytes)
        return cls(total, largest)
