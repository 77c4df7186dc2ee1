"""Lazy tensors: they stand for a layer's fused tensors, and fetch the experts that a function indexes them with."""

from __future__ import annotations

import torch

from .cache import ExpertCache
from .layer import ExpertLayer


class ExpertQueue:
    """The experts of one call in the order in which they are asked for, in waves: as many at once as there is room
    for, and the next wave on its way if there is room for that, too.

    Args:
        cache: Where they are brought to.
        layer: Whose experts.
        chosen: Their numbers.
        held: What the call's visit of the cache holds: first the slots of the present wave, then of the next.
    """

    def __init__(self, cache: ExpertCache, layer: ExpertLayer, chosen: list[int], held: list[int]) -> None:
        self._cache = cache
        self._layer = layer
        self._waves = split(chosen, fitting(len(chosen), cache.slots))
        self._wave_of = {expert: number for number, wave in enumerate(self._waves) for expert in wave}
        self._slot_of: dict[int, int] = {}
        self._held = held
        self._present = 0
        self._coming: int | None = None
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

    def _turn_to(self, number: int) -> None:
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
    """Return `experts` in lists of `size`, the last of which may be shorter."""
    return [experts[start : start + size] for start in range(0, len(experts), max(1, size))]
