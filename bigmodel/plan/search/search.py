"""The search: which groups stay, which are streamed, which the CPU computes, so that a pass takes least time.

A model of few groups is searched to the end (branch and bound). A deep one is searched where good placements are:
streamed groups spread between resident ones, so that the link brings the next while others compute; then improved by
exchanging groups as long as that helps. Greedy's placement is where both begin, so nothing worse is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...devices import DISK, HOST
from .branch_and_bound import BranchAndBound, Least, Seconds
from .capacity import Item, Placement, Room
from .feasibility import Option, options_of, settle
from .greedy import Bin, fill_in_order, place_greedily
from .items import NEVER

EXACT = 12
"""Up to so many groups are searched to the end, as long as that takes no more than `NODES` steps."""

TRIES = 240
"""Placements of a deep model that are looked at in improving."""


def search(
    items: Sequence[Item], room: Room, seconds: Seconds, least: Least, thorough: bool = True
) -> Placement | None:
    """Return the placement of least time found; None if nothing fits.

    Args:
        items: the groups, in the order they run.
        room: the budgets.
        seconds: what a placement takes.
        least: what one group takes at least, whatever the others do.
        thorough: False looks at a few good candidates only.
    """
    best: Placement | None = None
    shortest = float("inf")
    for placement in _candidates(items, room):
        taken = seconds(placement)
        if taken < shortest:
            best, shortest = placement, taken
    if not thorough:
        return best
    if len(items) <= EXACT:
        return BranchAndBound(items, room, seconds, least, best, shortest).run()
    return best if best is None else _improved(items, room, seconds, best, shortest)


def _candidates(items: Sequence[Item], room: Room) -> Iterator[Placement]:
    """Yield placements that are good for some machine or other."""
    greedy = place_greedily(items, room)
    if greedy is not None:
        yield greedy
    if not room.accelerators:
        return
    if room.host_compute:
        nothing_streamed = place_greedily([replace(item, slab=NEVER if item.slab else 0) for item in items], room)
        if nothing_streamed is not None:
            yield nothing_streamed
    for lookups_stay in (True, False):
        for computed in (0.0, 0.25, 0.5, 0.75, 1.0) if room.host_compute else (0.0,):
            found = _spread(items, room, lookups_stay, computed)
            if found is not None:
                yield found


def _spread(items: Sequence[Item], room: Room, lookups_stay: bool, computed: float) -> Placement | None:
    """Return the placement with the fewest groups away from the accelerators, evenly spread; None if none fits.

    Args:
        items: the groups.
        room: the budgets.
        lookups_stay: lookups are resident if they can be.
        computed: share of the groups away that the CPU computes.
    """
    movable = [index for index, item in enumerate(items) if item.streams and not item.pinned]
    low, high, found = 0, len(movable), None
    while low <= high:  # with more groups away less is resident, so the fewest are found by bisection
        middle = (low + high) // 2
        placement = _away(items, room, _evenly(movable, middle), lookups_stay, computed)
        if placement is None:
            low = middle + 1
        else:
            found, high = placement, middle - 1
    return found


def _evenly(positions: Sequence[int], count: int) -> list[int]:
    return [positions[(2 * turn + 1) * len(positions) // (2 * count)] for turn in range(count)]


def _away(
    items: Sequence[Item], room: Room, away: Sequence[int], lookups_stay: bool, computed: float
) -> Placement | None:
    """Return the placement with these groups away from the accelerators and all others there; None past the budgets."""
    on_host = set(_evenly(away, round(computed * len(away)))) if computed else set()
    gone = {index for index, item in enumerate(items) if not item.streams and not item.pinned and not lookups_stay}
    gone.update(away)
    streamed = [items[index] for index in away if index not in on_host]
    slab = max((item.slab for item in streamed), default=0)
    reserve = min(sum(item.streams for item in streamed), room.slots) * slab
    reserve += sum(items[index].working for index in gone if index not in on_host)
    bins = [
        Bin(key, room.budgets[key] - room.activations - (reserve if key == room.main else 0))
        for key in room.accelerators
    ]
    if any(bin_.free is not None and bin_.free < 0 for bin_ in bins if bin_.device == room.main):
        return None
    main = next(bin_ for bin_ in bins if bin_.device == room.main)
    bins = [bin_ for bin_ in bins if bin_.free is not None and bin_.free >= 0]
    for index, item in enumerate(items):
        if item.pinned:
            main.place(index, item.nbytes)
    stay = [(index, item.nbytes) for index, item in enumerate(items) if index not in gone and not item.pinned]
    if fill_in_order(stay, bins):
        return None
    chosen: dict[int, Option] = {index: (bin_.device, bin_.device) for bin_ in bins for index in bin_.placed}
    host = room.budgets.get(HOST, 0)
    host -= sum(items[index].working for index in on_host) + (room.activations if on_host else 0)
    for index in sorted(gone):
        nbytes = items[index].held_bytes(streams=index not in on_host)
        held = HOST if nbytes <= host else DISK
        host -= nbytes if held == HOST else 0
        chosen[index] = (held, HOST if index in on_host else room.main)
    return settle(items, room, [chosen[index] for index in range(len(items))])


def _improved(items: Sequence[Item], room: Room, seconds: Seconds, best: Placement, shortest: float) -> Placement:
    """Return `best` after exchanging and changing single groups as long as that makes it shorter, for some time."""
    tries = TRIES
    going = True
    while going and tries > 0:
        going = False
        for chosen in _neighbours(items, room, list(zip(best.held, best.runs, strict=True))):
            placement = settle(items, room, chosen)
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


def _neighbours(items: Sequence[Item], room: Room, chosen: list[Option]) -> Iterator[list[Option]]:
    """Yield what a small change makes of the options: one group's changed, or those of two near groups exchanged."""
    for index, item in enumerate(items):
        for option in options_of(item, room):
            if option != chosen[index]:
                yield [*chosen[:index], option, *chosen[index + 1 :]]
    for distance in range(1, len(items)):
        for index in range(len(items) - distance):
            one, other = chosen[index], chosen[index + distance]
            if one != other and not items[index].pinned and not items[index + distance].pinned:
                changed = list(chosen)
                changed[index], changed[index + distance] = other, one
                yield changed
