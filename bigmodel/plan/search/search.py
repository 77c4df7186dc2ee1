"""The search for the placement of least time: which groups stay, which are streamed, which the CPU computes.

A model of few groups is searched exactly, by branch and bound. For a deep model the search starts from good candidates,
streamed groups spread evenly between resident ones so that the link fetches while others compute, and improves the best
by exchanging groups. Both start from the greedy placement, so the result is never slower than it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...devices import HOST
from ..result.budgets import Key
from .branch_and_bound import BranchAndBound, Least, Seconds
from .filling import Filling, Option, filled, may_hold, options_of, place_away, place_greedily
from .items import Capacity, GroupPlacement, Item

EXACT = 12
"""Models of at most this many groups are searched exactly, within `branch_and_bound.NODES` steps."""

SIZES = 3
"""Largest sizes of groups for which candidates stream groups of at most that size: larger ones would need larger slots.
"""

SMALL = 8
"""Times as large as a group a slot for it is at most, in these candidates: smaller ones stay, as they save little."""

NEARLY_ALL = 0.99
"""Share of the bytes that may leave the accelerators which groups of like sizes must have for candidates of all groups
to be left out, unless the search is thorough: moving the others, too, would change little."""

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
        least: lower bounds for one group, whatever the options of the others.
        thorough: False tries the candidates only.
    """
    best: GroupPlacement | None = None
    shortest = float("inf")
    for placement in _candidates(items, capacity, thorough):
        taken = seconds(placement, shortest)
        if taken < shortest:
            best, shortest = placement, taken
    if not thorough:
        return best
    if len(items) <= EXACT:
        return BranchAndBound(items, capacity, seconds, least, best, shortest).run()
    return best if best is None else _improved(items, capacity, seconds, best, shortest)


def _candidates(items: Sequence[Item], capacity: Capacity, thorough: bool) -> Iterator[GroupPlacement]:
    """Yield placements each of which is good on some machine; fewer of them unless the search is thorough."""
    greedy = place_greedily(items, capacity)
    if greedy is not None:
        yield greedy
    if not capacity.accelerators:
        return
    if capacity.host_compute:
        nothing_streamed = place_greedily([replace(item, can_stream=not item.units) for item in items], capacity)
        if nothing_streamed is not None:
            yield nothing_streamed
    movable = [index for index, item in enumerate(items) if item.units and not item.pinned]
    sizes = sorted({items[index].weights for index in movable}, reverse=True)[:SIZES]
    alike = [[index for index in movable if size <= SMALL * items[index].weights <= SMALL * size] for size in sizes]
    alike = [each for each in alike if len(each) < len(movable)]
    weights = [item.weights for item in items]
    enough = NEARLY_ALL * sum([weights[index] for index in movable])
    covers = not thorough and any(sum([weights[index] for index in each]) >= enough for each in alike)
    for lookups_stay in (True, False):
        for computed in (0.0, 0.25, 0.5, 0.75, 1.0) if capacity.host_compute else (0.0,):
            found = [_spread(items, capacity, moved, lookups_stay, computed) for moved in alike]
            if not (covers and any(found)):
                found.insert(0, _spread(items, capacity, movable, lookups_stay, computed))
            yield from filter(None, found)


def _spread(
    items: Sequence[Item], capacity: Capacity, movable: Sequence[int], lookups_stay: bool, computed: float
) -> GroupPlacement | None:
    """Return the placement with the fewest groups off the accelerators, evenly spread; None if none fits.

    Args:
        items: the groups.
        capacity: the budgets.
        movable: positions of those that may be off the accelerators.
        lookups_stay: lookups are resident if they fit.
        computed: share of the groups off the accelerators that the CPU computes.
    """
    low, high, found = 0, len(movable), None
    away = set(movable)
    stay = (at for at, item in enumerate(items) if at not in away and (item.units or item.pinned or lookups_stay))
    if not may_hold(items, capacity, stay):
        return None
    while low <= high:  # the more groups are away, the less is resident
        middle = (low + high) // 2
        execution = _execution_of(items, capacity, _evenly(movable, middle), lookups_stay, computed)
        placement = None if execution is None else place_away(items, capacity, execution)
        if placement is None:
            low = middle + 1
        else:
            found, high = placement, middle - 1
    return found


def _evenly(positions: Sequence[int], count: int) -> list[int]:
    return [positions[(2 * turn + 1) * len(positions) // (2 * count)] for turn in range(count)]


def _execution_of(
    items: Sequence[Item], capacity: Capacity, away: Sequence[int], lookups_stay: bool, computed: float
) -> dict[int, Key] | None:
    """Return the execution device of the groups `away` and of lookups that do not stay; None if one cannot run there.

    The arguments are those of `_spread`.
    """
    on_host = set(_evenly(away, round(computed * len(away)))) if computed else set()
    if not all(items[index].can_stream or index in on_host for index in away):
        return None
    lookups = (index for index, item in enumerate(items) if not item.units and not item.pinned and not lookups_stay)
    return {index: HOST if index in on_host else capacity.main for index in sorted({*away, *lookups})}


def _improved(
    items: Sequence[Item], capacity: Capacity, seconds: Seconds, best: GroupPlacement, shortest: float
) -> GroupPlacement:
    """Return `best` improved by local search: the first better neighbour is taken, as long as there is one.

    After a better one the search goes on behind it: those before were just tried, and tries are few. Where a group that
    must be on the main device does not fit there, the host runs everything, and nothing else may leave it.
    """
    if any(item.pinned and best.execution[index] != capacity.main for index, item in enumerate(items)):
        return best
    filling = filled(items, capacity, best)
    moves = _moves(items, capacity)
    count = sum(len(options_of(item, capacity)) for item in items) + math.comb(len(items), 2)
    tries, unchanged = TRIES, 0
    while tries > 0 and unchanged < count:
        changes = _changes(next(moves), items, capacity, filling.options)
        unchanged += 1
        if not changes:
            continue
        before = {index: filling.options[index] for index in changes}
        _change(filling, changes)
        placement = filling.placement()
        if placement is not None:
            tries -= 1
            better = shortest * (1 - 1e-9)
            taken = seconds(placement, better)
            if taken < better:
                best, shortest, unchanged = placement, taken, 0
                continue
        _change(filling, before)
    return best


def _change(filling: Filling, options: Mapping[int, Option]) -> None:
    for index, option in options.items():
        filling.remove(index)
        filling.add(index, option)


def _moves(items: Sequence[Item], capacity: Capacity) -> Iterator[tuple[int, Option | int]]:
    """Yield moves, over and over: a group and an option for it, then two groups whose options are exchanged, near ones
    first."""
    while True:
        for index, item in enumerate(items):
            for option in options_of(item, capacity):
                yield index, option
        for distance in range(1, len(items)):
            for index in range(len(items) - distance):
                yield index, index + distance


def _changes(
    move: tuple[int, Option | int], items: Sequence[Item], capacity: Capacity, chosen: Mapping[int, Option]
) -> dict[int, Option]:
    """Return the options that a move changes; none if it changes nothing or is not possible."""
    index, to = move
    if not isinstance(to, int):
        return {} if to == chosen[index] else {index: to}
    one, other = chosen[index], chosen[to]
    if one == other or items[index].pinned or items[to].pinned:
        return {}
    possible = items[index].may_take(other, capacity.main) and items[to].may_take(one, capacity.main)
    return {index: other, to: one} if possible else {}
