"""Measures the Python overhead of fetching experts, in seconds per call.

`dispatch` takes many small steps between a router and its experts: find the chosen experts, look up their slots, hold
them, renumber the tokens' choices, release them. They move next to no bytes.
"""

from __future__ import annotations

import copy
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from .timing import Effort

CHOSEN = 4
"""Number of experts that are requested."""


class _Books:
    """The slot of each expert, how often it was used, and how many calls hold it."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._place = {(0, expert): expert for expert in range(CHOSEN)}
        self._wanted = np.zeros(CHOSEN)
        self._users = np.zeros(CHOSEN, dtype=np.int64)
        self._experts = nn.Linear(1, 1)

    def ask(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the slots of the experts `numbers`."""
        chosen = [int(expert) for expert in torch.unique(numbers.cpu())]
        with self._changed:
            self._wanted *= 0.99
            self._wanted[chosen] += 1
            missing = sum((0, expert) not in self._place for expert in chosen)
        with self._changed:
            found = {expert: self._find(expert) for expert in chosen}
            absent = [expert for expert in chosen if found[expert] is None]
            held = [place for place in found.values() if place is not None]
            self._users[held] += 1
        time.perf_counter()
        shown = copy.copy(self._experts)
        slots = self._renumbered(numbers, chosen, held)
        start = int(slots.min()) * 0
        index = (slots - start).to(numbers.device)
        del shown, missing, absent
        with self._changed:
            self._users[held] -= 1
            self._changed.notify_all()
        return index

    def _find(self, expert: int) -> int | None:
        return self._place.get((0, expert))

    def _renumbered(self, numbers: torch.Tensor, chosen: list[int], held: list[int]) -> torch.Tensor:
        slot_of = numbers.new_zeros(max(chosen) + 1)
        slot_of[chosen] = torch.tensor(held, dtype=numbers.dtype)
        return slot_of[numbers]


def seconds_of_call(effort: Effort) -> float:
    """Return the seconds per function call, in Python and C, of such work.

    Large weights are read before each run, as in a model: they evict code and data from the processor's cache.
    """
    books, numbers = _Books(), torch.arange(CHOSEN).reshape(1, CHOSEN)
    weights = torch.full((max(effort.spread // 4, 1),), 0.5)
    taken = []
    for _ in range(5 * effort.repeats):
        weights.sum()
        started = time.perf_counter()
        books.ask(numbers)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) / calls_in(partial(books.ask, numbers))


def calls_in(work: Callable[[], object]) -> int:
    """Return how many function calls, in Python and C, `work` makes in this thread."""
    count = [0]

    def watch(_frame: object, event: str, _argument: object) -> None:
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count[0]
