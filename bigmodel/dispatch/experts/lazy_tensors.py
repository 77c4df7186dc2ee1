"""Lazy tensors: they replace a layer's fused tensors, and fetch the experts that a function indexes."""

from __future__ import annotations

import torch

from ...limits import WAVES
from .cache import ExpertCache
from .layer import ExpertLayer


class ExpertQueue:
    """Fetches the experts of one call in waves, in the order of their use, and the next wave ahead if it fits.

    Args:
        cache: The cache that they are fetched to.
        layer: The layer of the experts.
        chosen: Their numbers, in the order of their use.
        held: The slots held by the call's visit of the cache: first those of the present wave, then of the next.
    """

    def __init__(self, cache: ExpertCache, layer: ExpertLayer, chosen: list[int], held: list[int]) -> None:
        self._cache = cache
        self._layer = layer
        self._waves = split(chosen, wave_size(len(chosen), cache.slots))
        self._wave_of = {expert: number for number, wave in enumerate(self._waves) for expert in wave}
        self._slot_of: dict[int, int] = {}
        self._held = held
        self._present = 0
        self._coming: int | None = None
        self._gathered: dict[str, torch.Tensor] = {}

    def slot(self, expert: int) -> int:
        """Return the slot of `expert`, after waiting for its arrival."""
        if expert not in self._slot_of:
            self._enter_wave(self._wave_of[expert])
        return self._slot_of[expert]

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return copies of the slices of the experts `index`, by name of fused tensor.

        All names are copied on the first call, so that each expert is fetched once.
        """
        if not self._gathered:
            rows = self._cache.rows
            self._gathered = {name: row.new_empty(len(index), *row.shape[1:]) for name, row in rows.items()}
            # One by one: a gather would allocate another buffer, which no plan counts.
            for place in torch.argsort(index, stable=True).tolist():
                slot = self.slot(int(index[place]))
                for name, copied in self._gathered.items():
                    copied[place].copy_(rows[name][slot])
        return self._gathered

    def _enter_wave(self, number: int) -> None:
        """Hold the wave with this number, and start fetching the one after it."""
        self._slot_of = {}
        wave = self._waves[number]
        self._cache.release(self._held, self._present if self._coming == number else None)
        if self._held:
            self._cache.await_arrival(self._held)
        else:
            self._cache.acquire(self._layer, wave, self._held, soon=self._after(number))
        self._present, self._coming = len(self._held), None
        self._slot_of = dict(zip(wave, self._held))
        if number + 1 < len(self._waves):
            following, soon = self._waves[number + 1], self._after(number + 1)
            if self._cache.acquire(self._layer, following, self._held, wait=False, soon=soon):
                self._coming = number + 1

    def _after(self, number: int) -> list[int]:
        return [expert for wave in self._waves[number + 1 :] for expert in wave]


class LazyTensor:
    """Replaces the fused tensor `name`. Indexing it with one expert's number returns a view of its slice; with a tensor
    of numbers, a copy of their slices."""

    def __init__(self, experts: ExpertQueue, name: str, rows: torch.Tensor) -> None:
        self._experts = experts
        self._name = name
        self._rows = rows
        self.device = rows.device
        self.dtype = rows.dtype

    def __getitem__(self, index: torch.Tensor | int) -> torch.Tensor:
        if isinstance(index, torch.Tensor) and index.dim():
            return self._experts.gather(index.cpu()).pop(self._name)
        return self._rows[self._experts.slot(int(index))]


def wave_size(count: int, slots: int) -> int:
    """Return how many of `count` experts to hold at once, such that slots are left to fetch the next ones."""
    return count if count <= slots else max(1, slots // WAVES)


def split(experts: list[int], size: int) -> list[list[int]]:
    """Return `experts` in lists of `size`, the last of which may be shorter."""
    return [experts[start : start + size] for start in range(0, len(experts), max(1, size))]
