"""Eviction policy: the expert that is expected to be wanted last gives up its slot.

Layers are visited in a cycle, once per token, so what was used last is wanted again last of all: keeping the most
recently used (LRU) hits nothing as soon as a token uses more experts than there is room for. Here the wait for an
expert is estimated instead. If its layer chooses it with probability p at each visit, the next choice is expected
after d + (1/p - 1) rounds of the model, where d is the part of a round until its layer is visited next.

p is estimated from how often the layer chose the expert lately, and for the experts of its last choice at least as
the share of such experts that were chosen again the next time: routers differ in how much they repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

NEWEST = 0.05
"""Weight of the newest visit in an estimated frequency, which so looks back over some 20 tokens."""


class ExpertPolicy:
    """Estimates for every expert of every layer when it will be wanted again.

    Args:
        layers: How many layers have experts.
        experts: The most experts of a layer.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._layers = layers
        self._frequency: Floats = np.full((layers, experts), 1.0 / max(1, experts))
        self._last: Floats = np.zeros((layers, experts))
        self._repeats: Floats = np.zeros(layers)
        self._position = 0

    def visit(self, layer: int, chosen: Sequence[int]) -> None:
        """Note that a forward has come to `layer`, whose router chose the experts `chosen`."""
        indices = list(chosen)
        last = self._last[layer]
        if last.any():
            self._repeats[layer] += NEWEST * (last[indices].sum() / last.sum() - self._repeats[layer])
        last[:] = 0.0
        last[indices] = 1.0
        frequency = self._frequency[layer]
        frequency *= 1.0 - NEWEST
        frequency[indices] += NEWEST
        self._position = layer

    def waits(self, layers: Integers, experts: Integers) -> Floats:
        """Return for each pair of a layer and an expert the expected wait, in rounds of the model."""
        chance = np.maximum(self._frequency[layers, experts], self._last[layers, experts] * self._repeats[layers])
        ahead = (layers - self._position - 1) % self._layers + 1
        waits: Floats = ahead / self._layers + 1.0 / np.maximum(chance, 1e-12) - 1.0
        return waits
