"""Key-value buffers of one sequence, and the pool that their positions are counted against."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from bigmodel.limits import KV_PAGE

PROMPT_BLOCK = KV_PAGE
"""Positions of a prompt that are attended to in one call, and cached together. Counted from the prompt's start."""

GROWTH = PROMPT_BLOCK
"""Positions by which a sequence's buffers grow: whole prompt blocks."""


def round_up(tokens: int) -> int:
    """Positions allocated for ``tokens``: the next multiple of :data:`GROWTH`."""
    return -(-tokens // GROWTH) * GROWTH


class TokenPool:
    """Counts the allocated key-value positions; never more than ``capacity`` at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    @property
    def free(self) -> int:
        """Positions that are not allocated."""
        return self.capacity - self.used

    def take(self, positions: int) -> bool:
        """Take ``positions``; False, and nothing taken, when fewer are free."""
        if positions > self.free:
            return False
        self.used += positions
        return True

    def give_back(self, positions: int) -> None:
        """Free ``positions``. Raises RuntimeError when fewer are in use."""
        if positions > self.used:
            raise RuntimeError(f"{positions} positions given back, {self.used} held")
        self.used -= positions


class SequenceKV:
    """Keys and values of one sequence: per layer two tensors [key-value heads, capacity, dim].

    Buffers are allocated at the first write, with the device, dtype and shape of what the model hands over, and
    reallocated when ``reserve`` raised the capacity.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.model_cache: Any = None  # what a runner keeps that computes the sequence alone
        # States of layers with a recurrent state, by layer (see `compute.mixers`): now, and those of the ends of prompt
        # blocks that the prefix cache asks to keep.
        self.states: dict[int, Any] = {}
        self.keep_at: frozenset[int] = frozenset()
        self.kept: dict[int, dict[int, Any]] = {}
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, capacity: int) -> None:
        """Allow up to ``capacity`` positions from the next write on."""
        self.capacity = max(self.capacity, capacity)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers of layer ``index``; positions past the last one written are undefined."""
        return self._layers[index]

    def layers(self) -> Seq[int]:
        """Indices of the layers written so far."""
        return list(self._layers)

    def span(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [key-value heads, positions, dim] of positions ``start`` to ``end``."""
        keys, values = self._layers[layer]
        return keys[:, start:end], values[:, start:end]

    def cut(self, index: int) -> object:
        """Return prompt block ``index``, for `put`: copies, as views would keep the whole buffers alive."""
        rows = slice(index * PROMPT_BLOCK, (index + 1) * PROMPT_BLOCK)
        return {
            layer: (keys[:, rows].clone(), values[:, rows].clone()) for layer, (keys, values) in self._layers.items()
        }

    def put(self, index: int, block: Any) -> None:
        """Take over what another sequence's `cut` gave, as prompt block ``index``."""
        for layer, (keys, values) in block.items():
            self.write(layer, index * PROMPT_BLOCK, keys, values)

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key`` and ``value`` [key-value heads, tokens, dim] at positions from ``start`` on."""
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
