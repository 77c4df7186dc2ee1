"""Measures what each call takes in asking for a mixture's experts: many small steps in Python.

They are those that `dispatch` takes between a router and its experts: which are chosen, where each of them lies, that
it is held, the tokens' choices renumbered, and that it is let go of. Bytes are next to nothing in them.
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
"""How many experts are asked for."""


class _Books:
    """Which slot each expert is in, how often it was wanted, and by how many it is held."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._place = {(0, expert): expert for expert in range(CHOSEN)}
        self._wanted = np.zeros(CHOSEN)
        self._users = np.zeros(CHOSEN, dtype=np.int64)
        self._experts = nn.Linear(1, 1)

    def ask(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the slots of experts, given their numbers."""
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
    """Return the seconds of each call in Python, of functions of its own and of others', in such work.

    Each time large weights were just read: they drive code and data out of the processor's cache.
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
    """Return how many calls `work` makes in this thread, of functions written in Python and in C."""
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
