"""Branch and bound over the options of every group: the search of a model of few groups, to the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...devices import DISK
from ..result.budgets import Key, is_accelerator
from .capacity import Item, Placement, Room
from .feasibility import Option, options_of, settle

Seconds = Callable[[Placement], float]
"""What the search makes least."""

Least = Callable[[int, Option], tuple[float, float]]
"""The seconds that a group computes, and those that the link brings it, under an option."""

NODES = 60_000
"""Steps of branch and bound, and of those that look at a whole placement a thirtieth."""


@dataclass
class BranchAndBound:
    """A search under way.

    Attributes:
        items: the groups, in the order they run.
        room: the budgets.
        seconds: what a placement takes.
        least: what one group takes at least, whatever the others do.
        best: the best placement known.
        shortest: what that takes.
        left: steps that may still be made.
    """

    items: Sequence[Item]
    room: Room
    seconds: Seconds
    least: Least
    best: Placement | None
    shortest: float
    left: float = NODES

    def run(self) -> Placement | None:
        """Return the best placement of all, as far as the steps reach."""
        options = [options_of(item, self.room) for item in self.items]
        self._options = [
            [(option, *self.least(index, option)) for option in given] for index, given in enumerate(options)
        ]
        self._rest = [0.0]
        for given in reversed(self._options):
            self._rest.append(self._rest[-1] + min(compute for _, compute, _ in given))
        self._rest.reverse()
        self._descend([], 0.0, 0.0, 0, {})
        return self.best

    def _descend(self, chosen: list[Option], compute: float, link: float, streamed: int, used: dict[Key, int]) -> None:
        index = len(chosen)
        busy = link if streamed > self.room.slots else 0.0
        self.left -= 1
        if self.left <= 0 or max(compute + self._rest[index], busy) >= self.shortest * (1 - 1e-6):
            return
        if index == len(self.items):
            self._try(chosen)
            return
        item = self.items[index]
        for option, own, fetch in self._options[index]:
            held, runs = option
            taken = dict(used)
            streams = is_accelerator(runs) and not is_accelerator(held)
            taken[held] = taken.get(held, 0) + item.held_bytes(streams)
            taken[runs] = taken.get(runs, 0) + item.working
            if any(taken[key] > self.room.budgets.get(key, taken[key] if key == DISK else 0) for key in (held, runs)):
                continue
            turns = item.streams if fetch else 0
            self._descend([*chosen, option], compute + own, link + fetch, streamed + turns, taken)

    def _try(self, chosen: Sequence[Option]) -> None:
        placement = settle(self.items, self.room, chosen)
        if placement is not None:
            self.left -= 30
            taken = self.seconds(placement)
            if taken < self.shortest:
                self.best, self.shortest = placement, taken
