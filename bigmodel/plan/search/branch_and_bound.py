"""Branch and bound: the placement of least time of a model of few groups.

Groups are given options in the order they run. A partial placement is abandoned when no placement that completes it can
be faster than the best known. The lower bound that shows this relaxes the problem to a knapsack: the remaining groups
share the bytes that are still free on all accelerators together, and a pass takes no less than it computes, than its
link is busy, nor than any mean of the two. Each knapsack is solved once for every suffix of the groups and any bytes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add

from ...devices import DISK, HOST
from ..result.budgets import is_accelerator
from .filling import Filling, Option, options_of
from .items import Capacity, GroupPlacement, Item

Seconds = Callable[[GroupPlacement, float], float]
"""The objective that the search minimises. It may return infinity where it is no less than the second argument."""

Least = Callable[[int, Option], Sequence[tuple[float, float]]]
"""Lower bounds of a group's seconds under an option, for each phase: of computing, and on the link."""

NODES = 60_000
"""Steps of branch and bound; predicting the seconds of a whole placement counts as 30."""

POINTS = 256
"""Points of a knapsack's solution at most; more are rounded to better ones."""


@dataclass
class BranchAndBound:
    """Branch and bound over the options of every group.

    Attributes:
        items: the groups, in the order they run.
        capacity: the budgets.
        seconds: the seconds of a placement.
        least: lower bounds for one group, whatever the options of the others.
        best: the best placement known.
        shortest: its seconds.
        left: steps that remain.
    """

    items: Sequence[Item]
    capacity: Capacity
    seconds: Seconds
    least: Least
    best: GroupPlacement | None
    shortest: float
    left: float = NODES

    def run(self) -> GroupPlacement | None:
        """Return the best placement of all, or the best found when the steps ran out."""
        ample = _host_holds_all(self.items, self.capacity)
        self._choices = [
            [
                _choice(item, option, self.least(index, option), self.capacity.slots)
                for option in options_of(item, self.capacity)
                if not (ample and option[0] == DISK)
            ]
            for index, item in enumerate(self.items)
        ]
        self._knapsacks = (
            [
                _knapsacks([[(choice.nbytes, choice.costs[number]) for choice in given] for given in self._choices])
                for number in range(len(self._choices[0][0].costs))
            ]
            if self._choices
            else []
        )
        self._turns = _knapsacks([[(choice.nbytes, choice.turns) for choice in given] for given in self._choices])
        self._filling = Filling(self.items, self.capacity)
        self._descend(0, [0.0] * len(self._knapsacks), 0)
        return self.best

    def _descend(self, index: int, spent: Sequence[float], turns: int) -> None:
        """Try all options of the groups from `index` on.

        Args:
            index: how many groups have an option.
            spent: the costs of these, by mean.
            turns: how many units of these are streamed.
        """
        self.left -= 1
        if self.left <= 0 or self._hopeless(index, spent, turns):
            return
        if index == len(self.items):
            self._try()
            return
        for choice in self._choices[index]:
            self._filling.add(index, choice.option)
            if self._filling.fits():
                self._descend(index + 1, list(map(add, spent, choice.costs)), turns + choice.turns)
            self._filling.remove(index)

    def _hopeless(self, index: int, spent: Sequence[float], turns: int) -> bool:
        """Return whether no placement of the groups from `index` on fits and is faster than the best known."""
        free = self._filling.free_on_accelerators()
        limit = self.shortest * (1 - 1e-6)
        busy = turns + self._turns[index].least(free) > self.capacity.slots
        means = range(len(spent)) if busy else range(1)  # what fits the slots stays there: the link is idle
        return any(spent[mean] + self._knapsacks[mean][index].least(free) >= limit for mean in means)

    def _try(self) -> None:
        placement = self._filling.placement()
        if placement is not None:
            self.left -= 30
            taken = self.seconds(placement, self.shortest)
            if taken < self.shortest:
                self.best, self.shortest = placement, taken


@dataclass(frozen=True)
class _Choice:
    """An option of a group.

    Attributes:
        option: storage and execution device.
        nbytes: bytes that it takes on accelerators, without what streamed units share.
        turns: how many of its units are streamed.
        costs: means of its seconds of computing and on the link; the first one is of computing alone.
    """

    option: Option
    nbytes: int
    turns: int
    costs: tuple[float, ...]


def _choice(item: Item, option: Option, least: Sequence[tuple[float, float]], slots: int) -> _Choice:
    storage, execution = option
    nbytes = item.stored_bytes(option) if is_accelerator(storage) else 0
    nbytes += item.working if is_accelerator(execution) else 0
    turns = len(item.units) if any(fetch for _, fetch in least) else 0
    # With one slot nothing is fetched while others compute.
    shares = ((1.0, 1.0),) if slots < 2 else ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0))
    costs = [
        sum(share * compute + other * fetch for (share, other), (compute, fetch) in zip(mean, least, strict=True))
        for mean in itertools.product(shares, repeat=len(least))
    ]
    return _Choice(option, nbytes, turns, (sum(compute for compute, _ in least), *costs))


def _host_holds_all(items: Sequence[Item], capacity: Capacity) -> bool:
    """Return whether the host has room for all groups at once, so that none is better held on disk.

    Experts that the host reads from disk make caches larger, also those of accelerators: with experts it is False.
    """
    if any(unit.experts for item in items for unit in item.units):
        return False
    held = sum(max(item.weights, item.offloaded or 0, item.packed or 0) + item.working for item in items)
    return held + capacity.activations <= capacity.budgets.get(HOST, 0)


class _Knapsack:
    """The least cost of some groups for any number of bytes that they may take.

    Args:
        points: bytes and cost, ascending by bytes, descending by cost.
    """

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self.points = points
        self._nbytes = [nbytes for nbytes, _ in points]

    def least(self, free: int) -> float:
        """Return the least cost within `free` bytes; infinite if they do not fit."""
        at = bisect_right(self._nbytes, free)
        return self.points[at - 1][1] if at else float("inf")


def _knapsacks(choices: Sequence[Sequence[tuple[int, float]]]) -> list[_Knapsack]:
    """Return the knapsack of the groups from each position on, and that of none.

    Args:
        choices: bytes and cost of each option of each group.
    """
    found = [_Knapsack([(0, 0.0)])]
    for given in reversed(choices):
        sums = ((a + b, cost + more) for a, cost in found[-1].points for b, more in given)
        found.append(_Knapsack(_thinned(_best(sums))))
    return found[::-1]


def _best(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points that no other equals in fewer bytes."""
    found: list[tuple[int, float]] = []
    for nbytes, cost in sorted(points):
        if not found or cost < found[-1][1]:
            found.append((nbytes, cost))
    return found


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most `POINTS` points, each with the fewest bytes and the least cost of several."""
    step = -(-len(points) // POINTS)
    return [(points[at][0], points[min(at + step, len(points)) - 1][1]) for at in range(0, len(points), step)]
