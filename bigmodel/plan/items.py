"""From a profile to the items that placements are made of, and from a placement back to units."""

from __future__ import annotations

from collections.abc import Sequence

from ..devices import HOST
from ..profile import Profile
from .budgets import is_accelerator
from .evaluate import Assignment
from .greedy import Item, Placement
from .groups import Group


def item_of(group: Group, profile: Profile, stream_buffers: bool) -> Item:
    """Return what placing `group` takes.

    Args:
        group: units that lie on one device.
        profile: whose units they are.
        stream_buffers: buffers lie with the weights, and not where the unit runs.
    """
    units = [profile.units[index] for index in group.members]
    streamed = [unit for unit in units if not unit.is_lookup and unit.nbytes]
    kv_cache = sum(profile.kv_cache[index] for index in group.members)
    return Item(
        weights=group.nbytes if stream_buffers else group.weights,
        working=kv_cache if stream_buffers else kv_cache + group.buffers,
        slab=max((unit.slab(stream_buffers) for unit in streamed), default=0),
        streams=len(streamed),
        pinned=any(unit.is_tensor for unit in units),
    )


def assignment_of(profile: Profile, groups: Sequence[Group], placement: Placement, stream_buffers: bool) -> Assignment:
    """Return a placement of groups as an assignment of units."""
    total = len(profile.units)
    held, runs = [placement.main] * total, [placement.main] * total
    for at, group in enumerate(groups):
        for index in group.members:
            held[index] = placement.held[at]
            runs[index] = placement.runs[at]
            if profile.units[index].is_lookup and not is_accelerator(held[index]):
                runs[index] = HOST
    return Assignment(
        held=tuple(held),
        runs=tuple(runs),
        main=placement.main,
        slots=placement.slots,
        slot_bytes=placement.slot_bytes,
        stream_buffers=stream_buffers,
    )
