"""Groups of units that share tensors, the items that are placed for them, and a placement as an assignment of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...devices import HOST
from ...profile import Profile, UnitProfile
from ...profile.model.quantized import offloaded_bytes
from ..memory.assignment import Assignment
from ..result.budgets import Key, is_accelerator
from .capacity import Item, Placement, Room

NEVER = 2**62
"""Bytes of a slot that fits on no device: an item with such a slot is not streamed."""


@dataclass(frozen=True)
class Group:
    """Units that must be on one device because they share tensors; most groups are a single unit.

    Attributes:
        members: positions of the units in the list they came from, ascending.
        nbytes: bytes of all their tensors, each storage once.
        weights: the part of `nbytes` that is parameters.
    """

    members: tuple[int, ...]
    nbytes: int
    weights: int

    @property
    def buffers(self) -> int:
        """The part of `nbytes` that is buffers."""
        return self.nbytes - self.weights


def tie_groups(units: Sequence[UnitProfile]) -> list[Group]:
    """Return the groups of units that share a storage, in the order of their first units."""
    parent = list(range(len(units)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first_owner: dict[int, int] = {}
    for index, unit in enumerate(units):
        for storage in unit.storages:
            owner = first_owner.setdefault(storage, index)
            a, b = root(owner), root(index)
            parent[max(a, b)] = min(a, b)
    members: dict[int, list[int]] = {}
    for index in range(len(units)):
        members.setdefault(root(index), []).append(index)
    return [_group(units, tuple(indices)) for indices in members.values()]


def _group(units: Sequence[UnitProfile], members: tuple[int, ...]) -> Group:
    sizes: dict[int, tuple[int, bool]] = {}
    for index in members:
        for storage, spec in units[index].storages.items():
            known = sizes.get(storage)
            if known is None or (known[1] and not spec.is_buffer):
                sizes[storage] = (spec.nbytes, spec.is_buffer)
    weights = sum(nbytes for nbytes, is_buffer in sizes.values() if not is_buffer)
    return Group(members, sum(nbytes for nbytes, _ in sizes.values()), weights)


def item_of(group: Group, profile: Profile, stream_buffers: bool, streams: bool = True) -> Item:
    """Return the item to place for a group.

    Args:
        group: units that must be on one device.
        profile: the model.
        stream_buffers: buffers are held with the weights, and not where the unit runs.
        streams: False if the host computes the group wherever it is not resident.
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
    """Return the bytes of a streamed group where it is held, quantised as the profile says."""
    units = [profile.units[index] for index in group.members]
    lookups = sum(unit.weights for unit in units if unit.is_lookup)
    streamed = sum(offloaded_bytes(unit, profile.offload_dtype) for unit in units if not unit.is_lookup)
    return lookups + streamed + (group.buffers if stream_buffers else 0)


def assignment_of(
    profile: Profile,
    groups: Sequence[Group],
    placement: Placement,
    stream_buffers: bool,
    room: Room,
) -> Assignment:
    """Return a placement of groups as an assignment of units.

    Args:
        profile: the model.
        groups: its groups, in the order of the placement.
        placement: where each group is held and runs.
        stream_buffers: buffers are held with the weights, and not where the unit runs.
        room: where the inputs must be, if it has a main device; else they are on the placement's if that runs anything.
    """
    main = placement.main if room.main_device is not None else _used_main(placement)
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
        expert_cache=room.expert_cache,
    )


def _used_main(placement: Placement) -> Key:
    """Return the main device, or the first accelerator that runs anything if the main device runs nothing."""
    used = [key for key in placement.runs if is_accelerator(key)]
    return placement.main if placement.main in used or not used else used[0]
