"""The greedy placement as it fits to the byte: filled, checked against what it takes exactly, and filled again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...devices import DeviceLike, device_key
from ...errors import PlanError
from ...profile import Profile
from ..memory.assignment import Assignment
from ..memory.evaluate import device_uses, over_budget
from ..memory.shortage import budget_error
from ..result.budgets import Key, is_accelerator
from .capacity import Item, Room
from .greedy import balanced_caps, place_greedily
from .items import assignment_of, item_of, tie_groups

ATTEMPTS = 4
"""How often a placement is repeated with smaller budgets when its exact cost passes them."""


def greedy_assignment(
    profile: Profile, room: Room, strategy: str, stream_buffers: bool, streams: bool = True
) -> Assignment:
    """Return the greedy placement of a profile, or one balanced over the accelerators.

    Args:
        profile: the model.
        room: the budgets; without a main device, that is the first accelerator on which anything can run.
        strategy: one of `STRATEGIES`.
        stream_buffers: buffers lie with the weights, and not where the unit runs.
        streams: False has the host compute all that is not resident.

    Raises:
        BudgetError: nothing fits; the message names budgets that would do.
    """
    groups = tie_groups(profile.units)
    items = [item_of(group, profile, stream_buffers, streams) for group in groups]

    def attempt(budgets: Mapping[Key, int]) -> Assignment | None:
        best: Assignment | None = None
        for main in _mains(room, budgets):
            found = attempt_with(main, budgets)
            if found is not None and any(map(is_accelerator, found.runs)):
                return found
            best = best or found
        return best

    def attempt_with(main: Key | None, budgets: Mapping[Key, int]) -> Assignment | None:
        given = dict(budgets)
        for _ in range(ATTEMPTS):
            narrowed = replace(room, budgets=given, main_device=main)
            placement = place_greedily(items, replace(narrowed, budgets=_capped(items, narrowed, strategy)))
            if placement is None:
                return None
            assignment = assignment_of(profile, groups, placement, stream_buffers, room)
            over = over_budget(device_uses(profile, assignment), budgets)
            if not over:
                return assignment
            given.update({key: max(given.get(key, 0) - excess, 0) for key, excess in over.items()})
        return None

    found = attempt(room.budgets)
    if found is None:
        enough = sum(item.nbytes + room.slots * (item.slab if streams else 0) for item in items) + 2 * room.activations
        raise budget_error(room.budgets, enough, lambda budgets: attempt(budgets) is not None)
    return found


def room_around(assignment: Assignment, room: Room) -> Room:
    """Return the room to search from a greedy assignment: its main device is the assignment's, where the usual one has
    nothing to do."""
    if room.main in assignment.runs or not is_accelerator(assignment.main):
        return room
    return replace(room, main_device=assignment.main)


def _mains(room: Room, budgets: Mapping[Key, int]) -> list[Key | None]:
    """Return the main devices to try in turn: the first accelerator may be too small for what others have room for."""
    if room.main_device is not None:
        return [room.main_device]
    return [*replace(room, budgets=budgets).accelerators] or [None]


def checked_main(main_device: DeviceLike | None, budgets: Mapping[Key, int]) -> Key | None:
    """Return the key of the main device that was asked for.

    Raises:
        PlanError: it has no budget.
    """
    if main_device is None:
        return None
    key = main_device if type(main_device) is int else device_key(main_device)
    if budgets.get(key, 0) <= 0:
        raise PlanError(f"main_device is {key!r}, but max_memory gives it no budget")
    return key


def _capped(items: Sequence[Item], room: Room, strategy: str) -> dict[Key, int]:
    """Return the budgets, the accelerators' lowered so that filling them in order is balanced."""
    budgets = dict(room.budgets)
    keys = room.accelerators
    if strategy not in ("balanced", "balanced_low_0") or len(keys) < 2:
        return budgets
    capacities = [max(budgets[key] - room.activations, 0) for key in keys]
    caps = balanced_caps([item.nbytes for item in items], capacities, strategy == "balanced_low_0")
    if caps != capacities:
        budgets.update({key: cap + room.activations for key, cap in zip(keys, caps, strict=True)})
    return budgets
