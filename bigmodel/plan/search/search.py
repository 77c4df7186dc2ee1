"""The search for the placement of least time: which groups stay, which are streamed, which the CPU computes.

A model of few groups is searched exactly, by branch and bound. For a deep model the search starts from good candidates,
streamed groups spread evenly between resident ones so that the link fetches while others compute, and improves the best
by exchanging groups. Both start from the greedy placement, so the result is never slower than it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...devices import DISK, HOST
from ..memory.usage import MemoryUsage
from .feasibility import Option, add_group, feasible_placement, options_of, remove_group
from .greedy import Bin, fill_in_order, place_greedily
from .items import NEVER, Capacity, GroupPlacement, Item

Seconds = Callable[[GroupPlacement], float]
"""What the search minimises."""

Least = Callable[[int, Option], tuple[float, float]]
"""A lower bound of a group's seconds of computing, and of its seconds on the link, under an option."""

EXACT = 12
"""Models of at most this many groups are searched exactly, within `NODES` steps."""

NODES = 60_000
"""Steps of branch and bound; predicting the seconds of a whole placement counts as 30."""

TRIES = 240
"""Placements of a deep model that are tried to improve the best candidate."""


def search(
    items: Sequence[Item], capacity: Capacity, seconds: Seconds, least: Least, thorough: bool = True
) -> GroupPlacement | None:
    """Return the placement of least time found; None if nothing fits.

    Args:
        items: the groups, in the order they run.
        capacity: the budgets.
        seconds: the seconds of a placement.
        least: a lower bound for one group, whatever the options of the others.
        thorough: False tries the candidates only.
    """
    best: GroupPlacement | None = None
    shortest = float("inf")
    for placement in _candidates(items, capacity):
        taken = seconds(placement)
        if taken < shortest:
            best, shortest = placement, taken
    if not thorough:
        return best
    if len(items) <= EXACT:
        return BranchAndBound(items, capacity, seconds, least, best, shortest).run()
    return best if best is None else _improved(items, capacity, seconds, best, shortest)


def _candidates(items: Sequence[Item], capacity: Capacity) -> Iterator[GroupPlacement]:
    """Yield placements each of which is good on some machine."""
    greedy = place_greedily(items, capacity)
    if greedy is not None:
        yield greedy
    if not capacity.accelerators:
        return
    if capacity.host_compute:
        nothing_streamed = place_greedily(
            [replace(item, slot_bytes=NEVER if item.slot_bytes else 0) for item in items], capacity
        )
        if nothing_streamed is not None:
            yield nothing_streamed
    for lookups_stay in (True, False):
        for computed in (0.0, 0.25, 0.5, 0.75, 1.0) if capacity.host_compute else (0.0,):
            found = _spread(items, capacity, lookups_stay, computed)
            if found is not None:
                yield found


def _spread(items: Sequence[Item], capacity: Capacity, lookups_stay: bool, computed: float) -> GroupPlacement | None:
    """Return the placement with the fewest groups off the accelerators, evenly spread; None if none fits.

    Args:
        items: the groups.
        capacity: the budgets.
        lookups_stay: lookups are resident if they fit.
        computed: share of the groups off the accelerators that the CPU computes.
    """
    movable = [index for index, item in enumerate(items) if item.streams and not item.pinned]
    low, high, found = 0, len(movable), None
    while low <= high:  # the more groups are away, the less is resident
        middle = (low + high) // 2
        placement = _away(items, capacity, _evenly(movable, middle), lookups_stay, computed)
        if placement is None:
            low = middle + 1
        else:
            found, high = placement, middle - 1
    return found


def _evenly(positions: Sequence[int], count: int) -> list[int]:
    return [positions[(2 * turn + 1) * len(positions) // (2 * count)] for turn in range(count)]


def _away(
    items: Sequence[Item], capacity: Capacity, away: Sequence[int], lookups_stay: bool, computed: float
) -> GroupPlacement | None:
    """Return the placement with the groups `away` off the accelerators and all others on them; None if over budget."""
    on_host = set(_evenly(away, round(computed * len(away)))) if computed else set()
    gone = {index for index, item in enumerate(items) if not item.streams and not item.pinned and not lookups_stay}
    gone.update(away)
    streamed = [items[index] for index in away if index not in on_host]
    slot_bytes = max((item.slot_bytes for item in streamed), default=0)
    reserve = min(sum(item.streams for item in streamed), capacity.slots) * slot_bytes
    reserve += sum(items[index].working for index in gone if index not in on_host)
    bins = [
        Bin(key, capacity.budgets[key] - capacity.activations - (reserve if key == capacity.main else 0))
        for key in capacity.accelerators
    ]
    if any(bin_.free is not None and bin_.free < 0 for bin_ in bins if bin_.device == capacity.main):
        return None
    main = next(bin_ for bin_ in bins if bin_.device == capacity.main)
    bins = [bin_ for bin_ in bins if bin_.free is not None and bin_.free >= 0]
    for index, item in enumerate(items):
        if item.pinned:
            main.place(index, item.nbytes)
    stay = [(index, item.nbytes) for index, item in enumerate(items) if index not in gone and not item.pinned]
    if fill_in_order(stay, bins):
        return None
    chosen: dict[int, Option] = {index: (bin_.device, bin_.device) for bin_ in bins for index in bin_.placed}
    host = capacity.budgets.get(HOST, 0)
    host -= sum(items[index].working for index in on_host) + (capacity.activations if on_host else 0)
    for index in sorted(gone):
        nbytes = items[index].held_bytes(streams=index not in on_host)
        storage = HOST if nbytes <= host else DISK
        host -= nbytes if storage == HOST else 0
        chosen[index] = (storage, HOST if index in on_host else capacity.main)
    return feasible_placement(items, capacity, [chosen[index] for index in range(len(items))])


def _improved(
    items: Sequence[Item], capacity: Capacity, seconds: Seconds, best: GroupPlacement, shortest: float
) -> GroupPlacement:
    """Return `best` improved by local search: the first better neighbour is taken, as long as there is one."""
    tries = TRIES
    going = True
    while going and tries > 0:
        going = False
        for chosen in _neighbours(items, capacity, list(zip(best.storage, best.execution, strict=True))):
            placement = feasible_placement(items, capacity, chosen)
            if placement is None:
                continue
            tries -= 1
            taken = seconds(placement)
            if taken < shortest * (1 - 1e-9):
                best, shortest, going = placement, taken, True
                break
            if tries <= 0:
                break
    return best


def _neighbours(items: Sequence[Item], capacity: Capacity, chosen: list[Option]) -> Iterator[list[Option]]:
    """Yield neighbours: one group's option changed, or the options of two groups exchanged, near ones first."""
    for index, item in enumerate(items):
        for option in options_of(item, capacity):
            if option != chosen[index]:
                yield [*chosen[:index], option, *chosen[index + 1 :]]
    for distance in range(1, len(items)):
        for index in range(len(items) - distance):
            one, other = chosen[index], chosen[index + distance]
            if one != other and not items[index].pinned and not items[index + distance].pinned:
                changed = list(chosen)
                changed[index], changed[index + distance] = other, one
                yield changed


@dataclass
class BranchAndBound:
    """Branch and bound over the options of every group.

    Attributes:
        items: the groups, in the order they run.
        capacity: the budgets.
        seconds: the seconds of a placement.
        least: a lower bound for one group, whatever the options of the others.
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
        options = [options_of(item, self.capacity) for item in self.items]
        self._options = [
            [(option, *self.least(index, option)) for option in given] for index, given in enumerate(options)
        ]
        self._rest = [0.0]
        for given in reversed(self._options):
            self._rest.append(self._rest[-1] + min(compute for _, compute, _ in given))
        self._rest.reverse()
        self._usage = MemoryUsage(self.capacity.main, self.capacity.slots, self.capacity.staging_bytes)
        self._descend([], 0.0, 0.0, 0)
        return self.best

    def _descend(self, chosen: list[Option], compute: float, link: float, streamed: int) -> None:
        index = len(chosen)
        busy = link if streamed > self.capacity.slots else 0.0
        self.left -= 1
        if self.left <= 0 or max(compute + self._rest[index], busy) >= self.shortest * (1 - 1e-6):
            return
        if index == len(self.items):
            self._try(chosen)
            return
        item = self.items[index]
        for option, own, fetch in self._options[index]:
            add_group(self._usage, item, option, self.capacity)
            if not self._usage.over(self.capacity.budgets):
                turns = item.streams if fetch else 0
                self._descend([*chosen, option], compute + own, link + fetch, streamed + turns)
            remove_group(self._usage, item, option, self.capacity)

    def _try(self, chosen: Sequence[Option]) -> None:
        placement = feasible_placement(self.items, self.capacity, chosen)
        if placement is not None:
            self.left -= 30
            taken = self.seconds(placement)
            if taken < self.shortest:
                self.best, self.shortest = placement, taken
