"""Measures the host's overhead of experts that are fetched one by one: seconds of Python, without transfers.

Between a router and its experts, `dispatch` checks the device of the inputs, finds the chosen experts, looks up and
holds their slots, waits for their transfers, renumbers the tokens' choices and releases the slots. `MiniatureExperts`
does the same steps without a model. It runs with few and with many experts, between reads of large weights that evict
code and data from the processor's cache, as those of a model do.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ...devices.nested import are_all_on, send_to_device
from .machine import ExpertOverhead
from .timing import Effort

FEW, MANY = 2, 32
"""Numbers of chosen experts: the difference of their seconds gives those of one expert."""

MODULES = 3
"""Modules around the experts whose inputs are checked: the layer, its router and the experts."""


class _Slot:
    """A slot with the transfer that filled it, and marks of the computations that read it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.marks: list[object] = []
        self.ready: Future[float] = Future()
        self.ready.set_result(0.0)
        self.arrived = True
        self.failure: Exception | None = None

    def wait(self) -> None:
        """Wait for the transfer; raise its error."""
        self._raise_failure()
        self.arrived = self.ready.result() is not None

    def done(self) -> bool:
        """Whether the transfer has ended."""
        return self.arrived

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def mark(self, computed: object) -> None:
        """Add a mark of a computation that reads the slot, and remove those of finished ones."""
        self.marks = [mark for mark in self.marks if mark is None]
        self.marks.append(computed)


class MiniatureExperts:
    """The bookkeeping between a router and cached experts, without computations and transfers.

    Args:
        count: number of experts, all of them cached.
    """

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._slots = [_Slot(number) for number in range(count)]
        self._slot_of = {(0, expert): slot for expert, slot in enumerate(self._slots)}
        self._waits = np.zeros(count)
        self._users = np.zeros(count, dtype=np.int64)
        self._experts = nn.Linear(1, 1)
        self._arguments = inspect.signature(MiniatureExperts.compute)
        self._cpu = torch.device("cpu")

    def __call__(self, hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Do the bookkeeping of a call of the experts `numbers`."""
        arguments: tuple[Any, ...] = (hidden, numbers, weights)
        keywords = {"mask": None, "positions": (weights, weights), "cached": True}
        for module in range(MODULES):
            named = {} if module else keywords  # the tuple among them is traversed
            if not are_all_on(arguments, self._cpu) or not are_all_on(named.values(), self._cpu):
                arguments, named = send_to_device((arguments, named), self._cpu)
        result: torch.Tensor = self.compute(*self._arguments.bind(self, *arguments).args[1:])
        return result

    def compute(self, hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Look up, hold and release the experts, and return the slots of each token's experts."""
        numbers = numbers.cpu()
        chosen = [int(expert) for expert in torch.unique(numbers)]
        self._record(chosen)
        held: list[int] = []
        try:
            self._acquire(chosen, held)
            index = self._renumbered(numbers, chosen, held)
            index = (index - int(index.min()) * 0).to(hidden.device)
            shown = copy.copy(self._experts)
            shown.__dict__.update(weights=weights)
        finally:
            self._release(held)
        return index

    def fetch_ahead(self, experts: Sequence[int]) -> None:
        """Start fetching experts that are likely to be used next, each into its own slot."""
        with self._changed:
            found = {expert: self._find(expert) for expert in experts}
            order = np.argsort(-self._waits, kind="stable")
            for expert, number in zip(found, order, strict=False):
                slot = self._slots[number]
                slot.marks = [mark for mark in slot.marks if mark is None]
                slot.ready = self._fetch(expert, slot)
                self._slot_of[0, expert] = slot
                self._waits[slot.number] = expert

    def _fetch(self, expert: int, slot: _Slot) -> Future[float]:
        """Return a finished fetch."""
        fetched: Future[float] = Future()
        try:
            fetched.set_result(float(expert + slot.number))
        except ArithmeticError as failure:
            fetched.set_exception(failure)
        return fetched

    def _record(self, chosen: Sequence[int]) -> None:
        with self._changed:
            self._waits *= 0.99
            self._waits[chosen] += 1
            sum(self._is_cached(expert) for expert in chosen)

    def _acquire(self, chosen: Sequence[int], held: list[int]) -> None:
        with self._changed:
            found = {expert: self._find(expert) for expert in chosen}
            numbers = [slot.number for slot in found.values() if slot is not None]
            self._users[numbers] += 1
            held += numbers
        time.perf_counter()
        for number in held:
            self._slot(number).wait()
        time.perf_counter()

    def _release(self, held: list[int]) -> None:
        with self._changed:
            for number in held:
                self._slot(number).mark(None)
            self._users[held] -= 1
            self._changed.notify_all()

    def _is_cached(self, expert: int) -> bool:
        return self._find(expert) is not None

    def _find(self, expert: int) -> _Slot | None:
        slot = self._slot_of.get((0, expert))
        return slot if slot is not None and slot.done() else None

    def _slot(self, number: int) -> _Slot:
        return self._slots[number]

    def _renumbered(self, numbers: torch.Tensor, chosen: Sequence[int], held: Sequence[int]) -> torch.Tensor:
        slot_of = numbers.new_zeros(max(chosen) + 1)
        slot_of[list(chosen)] = numbers.new_tensor(list(held))
        return slot_of[numbers]


def miniature_call(chosen: int) -> Callable[[], object]:
    """Return a call of `chosen` experts, all of them cached, by one token."""
    experts, numbers = MiniatureExperts(chosen), torch.arange(chosen).reshape(1, chosen)
    return partial(experts, torch.zeros(1, 1), numbers, torch.zeros(1, chosen))


def expert_overhead(effort: Effort) -> ExpertOverhead:
    """Measure the overhead per module and per expert."""
    few, many = (_seconds(miniature_call(chosen), effort) for chosen in (FEW, MANY))
    ahead = _seconds(partial(MiniatureExperts(MANY).fetch_ahead, range(MANY)), effort) / MANY
    each = max(many - few, 0.0) / (MANY - FEW)
    return ExpertOverhead(module=max(few - FEW * each, 0.0), chosen=each, ahead=ahead)


def _seconds(work: Callable[[], object], effort: Effort) -> float:
    weights = torch.full((max(effort.spread // 4, 1),), 0.5)
    taken = []
    with torch.inference_mode():
        for _ in range(5 * effort.repeats):
            weights.sum()
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)
