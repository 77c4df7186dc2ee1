"""From a profile to the items that placements are made of, and from a placement back to units."""

from __future__ import annotations

from collections.abc import Sequence

from ...devices import HOST
from ...profile import Profile
from ...profile.model.quantized import offloaded_bytes
from ..memory.assignment import Assignment
from ..result.budgets import Key, is_accelerator
from .capacity import Item, Placement
from .groups import Group

NEVER = 2**62
"""Bytes of a slot that no device has: what has it is not streamed."""


def item_of(group: Group, profile: Profile, stream_buffers: bool, streams: bool = True) -> Item:
    """Return what placing `group` takes.

    Args:
        group: units that lie on one device.
        profile: whose units they are.
        stream_buffers: buffers lie with the weights, and not where the unit runs.
        streams: False for one that the host is to compute wherever it is not resident.
    """
    units = [profile.units[index] for index in group.members]
    streamed = [unit for unit in units if not unit.is_lookup and unit.nbytes]
    kv_cache = sum(profile.kv_cache[index] for index in group.members)
    return Item(
        weights=group.nbytes if stream_buffers else group.weights,
        working=kv_cache if stream_buffers else kv_cache + group.buffers,
        slab=max((unit.slab(stream_buffers) if streams else NEVER for unit in streamed), default=0),
        streams=len(streamed),
        pinned=any(unit.is_tensor for unit in units),
        offloaded=_offloaded(group, profile, stream_buffers) if profile.offload_dtype is not None else None,
    )


def _offloaded(group: Group, profile: Profile, stream_buffers: bool) -> int:
    """Return the bytes that a streamed group takes where it is held, quantised as the profile says."""
    units = [profile.units[index] for index in group.members]
    lookups = sum(unit.weights for unit in units if unit.is_lookup)
    streamed = sum(offloaded_bytes(unit, profile.offload_dtype) for unit in units if not unit.is_lookup)
    return lookups + streamed + (group.buffers if stream_buffers else 0)


def assignment_of(
    profile: Profile,
    groups: Sequence[Group],
    placement: Placement,
    stream_buffers: bool,
    main_device: Key | None = None,
) -> Assignment:
    """Return a placement of groups as an assignment of units.

    Args:
        profile: whose units they are.
        groups: of units, as they were placed.
        placement: where each group is held and runs.
        stream_buffers: buffers lie with the weights, and not where the unit runs.
        main_device: where the inputs must be; None: on the placement's main device, if that holds or runs anything.
    """
    main = placement.main if main_device is not None else _used_main(placement)
    total = len(profile.units)
    held, runs = [main] * total, [main] * total
    for at, group in enumerate(groups):
        for index in group.members:
            held[index] = placement.held[at]
            runs[index] = placement.runs[at]
            if profile.units[index].is_lookup and not is_accelerator(held[index]):
                runs[index] = HOST
    return Assignment(
        held=tuple(held),
        runs=tuple(runs),
        main=main,
        slots=placement.slots,
        slot_bytes=placement.slot_bytes,
        stream_buffers=stream_buffers,
    )


def _used_main(placement: Placement) -> Key:
    """Return the main device, or the first accelerator that runs anything where the main device has nothing to do."""
    used = [key for key in placement.runs if is_accelerator(key)]
    return placement.main if placement.main in used or not used else used[0]
