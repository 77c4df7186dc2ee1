"""Experts that are asked for: what stands for a layer's fused tensors where a function indexes them."""

from __future__ import annotations

import torch

from .cache import ExpertCache
from .layer import ExpertLayer


class ExpertQueue:
    """The experts of one call in the order in which they are asked for: as many at once as there is room for, the
    next ones on their way if there is room for those too."""

    def __init__(self, cache: ExpertCache, layer: ExpertLayer, chosen: list[int]) -> None:
        self._cache = cache
        self._layer = layer
        self._waves = split(chosen, fitting(len(chosen), cache.slots))
        self._wave_of = {expert: number for number, wave in enumerate(self._waves) for expert in wave}
        self._slot_of: dict[int, int] = {}
        self._held: list[int] = []
        self._coming: list[int] = []
        self._coming_wave: int | None = None
        self._gathered: dict[str, torch.Tensor] = {}

    def slot(self, expert: int) -> int:
        """Return the slot of `expert`, when it has arrived there."""
        if expert not in self._slot_of:
            self._turn_to(self._wave_of[expert])
        return self._slot_of[expert]

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a copy of the shares of many experts in each fused tensor by name. What was copied for the first name
        serves the others, so that each expert comes in once."""
        if not self._gathered:
            rows = self._cache.rows
            self._gathered = {name: row.new_empty(len(index), *row.shape[1:]) for name, row in rows.items()}
            # One by one: several at once would be gathered in memory of their own first, which no plan has room for.
            for place in torch.argsort(index, stable=True).tolist():
                slot = self.slot(int(index[place]))
                for name, copied in self._gathered.items():
                    copied[place].copy_(rows[name][slot])
        return self._gathered

    def close(self) -> None:
        """Let go of everything, also if that is interrupted."""
        self._gathered, self._slot_of = {}, {}
        try:
            self._cache.release_surely(self._held)
        finally:
            self._cache.release_surely(self._coming)

    def _turn_to(self, number: int) -> None:
        self._slot_of = {}
        self._cache.release(self._held)
        if self._coming_wave == number:
            self._held, self._coming, self._coming_wave = self._coming, self._held, None
            self._cache.await_arrival(self._held)
        else:
            self._cache.release(self._coming)
            self._coming_wave = None
            self._cache.acquire(self._layer, self._waves[number], self._held, soon=self._after(number))
        self._slot_of = dict(zip(self._waves[number], self._held))
        if number + 1 < len(self._waves):
            following, soon = self._waves[number + 1], self._after(number + 1)
            if self._cache.acquire(self._layer, following, self._coming, wait=False, soon=soon):
                self._coming_wave = number + 1

    def _after(self, number: int) -> list[int]:
        return [expert for wave in self._waves[number + 1 :] for expert in wave]


class AskedTensor:
    """What stands for the fused tensor `name`. It can be indexed with the number of an expert, which gives its share,
    or with several, which gives a copy of theirs."""

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


def fitting(count: int, slots: int) -> int:
    """Return how many of `count` experts to hold at once, so that there is room for the next ones to arrive."""
    return count if count <= slots else max(1, slots // 2)


def split(experts: list[int], size: int) -> list[list[int]]:
    return [experts[start : start + size] for start in range(0, len(experts), max(1, size))]
