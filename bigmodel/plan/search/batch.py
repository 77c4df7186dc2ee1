"""The batch size of a plan for throughput: how many sequences share a fetch of the streamed weights.

A larger batch computes more tokens for each byte that is fetched, but its activations and its KV cache leave less room
for weights, so that more of them are streamed. Throughput therefore grows with the batch, and falls again from some
size on. Each that is tried is planned whole, with its own dry run and placement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...errors import BudgetError
from ..result.plan import Plan

MOST_SEQUENCES = 1024
"""Largest batch that is tried."""

GAIN = 0.005
"""Share of throughput for which a batch is not doubled: each of its sequences would take twice as long."""

REFINEMENTS = 3
"""How often the sizes between the best one and its neighbours are halved."""

WITHOUT_PREDICTION = "no time is predicted, so batch_size is 1; give the one to plan for"


def best_batch(plan_at: Callable[[int], Plan], most: int = MOST_SEQUENCES) -> Plan:
    """Return the plan of most tokens per second; of those that differ by less than `GAIN`, the smallest.

    Sizes are doubled until one does not fit or two in a row gain nothing; then those around the best one are tried,
    unless throughput is flat there.

    Args:
        plan_at: returns the plan of a batch size; raises BudgetError if it does not fit.
        most: largest size that is tried.

    Raises:
        BudgetError: a single sequence does not fit.
    """
    first = plan_at(1)
    if first.prediction is None:
        return replace(first, notes=(*first.notes, WITHOUT_PREDICTION))
    tried = _Tried(plan_at, first)
    size, declines = 2, 0
    while size <= most and declines < 2 and tried.rate(size):
        declines = 0 if tried.rate(size) * (1 - GAIN) >= tried.rate(size // 2) else declines + 1
        size *= 2
    if all(tried.known(larger * tried.best) * (1 + GAIN) >= tried.rate(tried.best) for larger in (2, 4)):
        return tried.plans[tried.best]
    step = max(tried.best // 2, 1)
    for _ in range(REFINEMENTS):
        center = tried.best
        for neighbour in (center - (step + 1) // 2, center + step, center + (step + 1) // 2):
            if 1 <= neighbour <= most:
                tried.rate(neighbour)
        step = (step + 1) // 2
    return tried.plans[tried.best]


class _Tried:
    """The sizes that were planned.

    Attributes:
        plans: by batch size; sizes that do not fit have none.
        best: the smallest size of most tokens per second, but for `GAIN`.
    """

    def __init__(self, plan_at: Callable[[int], Plan], first: Plan) -> None:
        self._plan_at = plan_at
        self._rates = {1: first.tokens_per_second or 0.0}
        self.plans = {1: first}

    @property
    def best(self) -> int:
        enough = (1 - GAIN) * max(self._rates.values())
        return min(size for size, rate in self._rates.items() if rate >= enough)

    def known(self, size: int) -> float:
        """Return the tokens per second of a size that was planned; 0 for another."""
        return self._rates.get(size, 0.0)

    def rate(self, size: int) -> float:
        """Return the tokens per second of a size; 0 if it does not fit."""
        if size not in self._rates:
            try:
                self.plans[size] = self._plan_at(size)
            except BudgetError:
                self._rates[size] = 0.0
            else:
                self._rates[size] = self.plans[size].tokens_per_second or 0.0
        return self._rates[size]
