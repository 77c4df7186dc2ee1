"""Eviction policy of expert caches: evict the expert whose next use is expected last.

Layers are visited in a cycle, once per token, so the most recently used expert is needed again last of all: LRU has no
hits once a token uses more experts than there are slots. This policy estimates the time until the next use instead. If
a layer chooses an expert with probability p at each visit, the next use is expected after d + (1/p - 1) rounds of the
model, where d is the fraction of a round until the layer is visited next.

p is the expert's recent frequency of being chosen by its layer. For experts of the layer's last choice it is at least
the fraction of such experts that were chosen again at the next visit, which differs between routers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

NEWEST = 0.05
"""Weight of the newest visit in the moving average of frequencies, which so covers about 20 tokens."""


class ExpertPolicy:
    """Estimates the time until the next use of every expert of every layer.

    Args:
        layers: Number of layers with experts.
        experts: Largest number of experts of a layer.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._layers = layers
        self._frequency: Floats = np.full((layers, experts), 1.0 / max(1, experts))
        self._last: Floats = np.zeros((layers, experts))
        self._repeats: Floats = np.zeros(layers)
        self._position = 0

    def visit(self, layer: int, chosen: Sequence[int]) -> None:
        """Record that the router of `layer` chose the experts `chosen` in a forward."""
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

    def wait(self, layer: int, expert: int) -> float:
        """Return the expected time until the next use of one expert, in rounds of the model."""
        return float(self.waits(np.array([layer]), np.array([expert]))[0])

    def waits(self, layers: Integers, experts: Integers) -> Floats:
        """Return the expected time until the next use of each pair of layer and expert, in rounds of the model."""
        chance = np.maximum(self._frequency[layers, experts], self._last[layers, experts] * self._repeats[layers])
        ahead = (layers - self._position - 1) % self._layers + 1
        waits: Floats = ahead / self._layers + 1.0 / np.maximum(chance, 1e-12) - 1.0
        return waits
