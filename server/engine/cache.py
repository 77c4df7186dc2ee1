"""Keys and values: the buffers of each sequence, and the face a transformers model sees for one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from bigmodel.server.engine.attention import Piece, split_positions

GROWTH = 128  # positions by which a sequence's buffers grow; whole prompt blocks


def round_up(tokens: int) -> int:
    """Positions allocated for ``tokens``: the next multiple of :data:`GROWTH`."""
    return -(-tokens // GROWTH) * GROWTH


class SequenceKV:
    """The keys and values of one sequence: per layer two tensors [key-value heads, capacity, dim].

    Buffers are made on the device, in the dtype and shape the model hands over at the first step, and grow
    when ``reserve`` raised the capacity.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.own: DynamicCache | None = None  # the model's own cache, where the plain runner computes
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, capacity: int) -> None:
        """Allow up to ``capacity`` positions from the next write on."""
        self.capacity = max(self.capacity, capacity)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of layer ``index``; positions past what was written are undefined."""
        return self._layers[index]

    def layers(self) -> Seq[int]:
        return list(self._layers)

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key`` and ``value`` [heads, tokens, dim] at positions from ``start`` on."""
        end = start + key.shape[1]
        if end > self.capacity:
            raise RuntimeError(f"position {end} is past the {self.capacity} positions reserved")
        held = self._layers.get(layer)
        if held is None or held[0].shape[1] < end:
            held = (self._grown(held and held[0], key, start), self._grown(held and held[1], value, start))
            self._layers[layer] = held
        held[0][:, start:end] = key
        held[1][:, start:end] = value

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor, used: int) -> torch.Tensor:
        new = like.new_empty(like.shape[0], self.capacity, like.shape[2])
        if old is not None:
            new[:, :used] = old[:, :used]
        return new


@dataclass(frozen=True)
class Span:
    """Rows ``row`` .. of a packed step: positions ``start`` to ``end`` of a sequence with this prompt length."""

    kv: SequenceKV
    row: int
    start: int
    end: int
    prompt_length: int


class RaggedCache(DynamicCache):
    """The cache handed to the model for one packed step: writes go to each sequence's own buffers."""

    def __init__(self, spans: Seq[Span]) -> None:
        super().__init__()
        self.spans = spans
        self.pieces: list[Piece] = []
        self.attended: set[int] = set()  # layers that attended through this cache
        for span in spans:
            for start, end in split_positions(span.start, span.end, span.prompt_length):
                self.pieces.append(Piece(span.kv, span.row + start - span.start, start, end))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the packed keys and values [1, heads, tokens, dim] of layer ``layer_idx``; returned unchanged."""
        with torch._C.DisableTorchFunction():  # as in attention: these are many small calls
            for span in self.spans:
                rows = slice(span.row, span.row + span.end - span.start)
                span.kv.write(layer_idx, span.start, key_states[0, :, rows], value_states[0, :, rows])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always given to the model explicitly."""
        return 0
