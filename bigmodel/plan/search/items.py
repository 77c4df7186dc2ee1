"""Input of the placement algorithms: groups of units that share tensors, items to place, capacities of devices.

`item_of` makes the item of a group; `assignment_of` turns a placement of groups into an assignment of units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ...devices import HOST
from ...devices.memory import CachingMemory
from ...limits import DEFAULT_SLOTS, READERS, STAGING_BYTES
from ...profile import Profile, UnitProfile
from ...profile.model.quantized import offloaded_bytes
from ..memory.assignment import Assignment
from ..memory.usage import PassingUnit, passing_unit
from ..result.budgets import Key, is_accelerator


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
    moved = [unit for unit in units if not unit.is_lookup and unit.nbytes]
    kv_cache = sum(profile.kv_cache[index] for index in group.members)
    offload_dtype = profile.offload_dtype
    found = Item(
        weights=group.nbytes if stream_buffers else group.weights,
        working=kv_cache if stream_buffers else kv_cache + group.buffers,
        units=tuple(passing_unit(unit, offload_dtype, stream_buffers, bool(profile.phases)) for unit in moved),
        can_stream=streams or not moved,
        pinned=any(unit.is_tensor for unit in units),
        lends=not profile.lending.isdisjoint(group.members),
        offloaded=_offloaded(group, profile, stream_buffers, offload_dtype) if offload_dtype is not None else None,
        packed=_packed(group, profile, stream_buffers) if profile.packing else None,
    )
    return _one_of(found)


@lru_cache(maxsize=1024)
def _one_of(item: Item) -> Item:
    """Return one object for all equal items: where one does not fit, the search does not try the others."""
    return item


def _offloaded(group: Group, profile: Profile, stream_buffers: bool, offload_dtype: str) -> int:
    """Return the bytes of a streamed group where it is held, quantised."""
    units = [profile.units[index] for index in group.members]
    lookups = sum(unit.weights for unit in units if unit.is_lookup)
    streamed = sum(offloaded_bytes(unit, offload_dtype) for unit in units if not unit.is_lookup)
    return lookups + streamed + (group.buffers if stream_buffers else 0)


def _packed(group: Group, profile: Profile, stream_buffers: bool) -> int:
    """Return the bytes of a group in RAM where the host computes it, packed."""
    specs = {number: spec for index in group.members for number, spec in profile.units[index].storages.items()}
    more = sum(spec.packed - spec.nbytes for spec in specs.values() if spec.packed is not None)
    return more + (group.nbytes if stream_buffers else group.weights)


def assignment_of(
    profile: Profile,
    groups: Sequence[Group],
    placement: GroupPlacement,
    stream_buffers: bool,
    capacity: Capacity,
) -> Assignment:
    """Return a placement of groups as an assignment of units.

    Args:
        profile: the model.
        groups: its groups, in the order of the placement.
        placement: storage and execution device of each group.
        stream_buffers: buffers are held with the weights, and not where the unit runs.
        capacity: its main device is where the inputs must be; without one, they are on the placement's if that runs
            anything.
    """
    main = placement.main if capacity.main_device is not None else _used_main(groups, placement)
    total = len(profile.units)
    storage, execution = [main] * total, [main] * total
    for at, group in enumerate(groups):
        for index in group.members:
            storage[index] = placement.storage[at]
            # A unit without tensors runs where its inputs lie.
            execution[index] = placement.execution[at] if profile.units[index].tensors else main
            if profile.units[index].is_lookup and not is_accelerator(storage[index]):
                execution[index] = HOST
    return Assignment(
        storage=tuple(storage),
        execution=tuple(execution),
        main=main,
        slots=placement.slots,
        slot_bytes=placement.slot_bytes,
        stream_buffers=stream_buffers,
        expert_cache=capacity.expert_cache,
        staging_bytes=capacity.staging_bytes,
        readers=capacity.readers,
        caching=capacity.caching,
        limits=capacity.budgets if capacity.caching else {},
    )


def _used_main(groups: Sequence[Group], placement: GroupPlacement) -> Key:
    """Return the main device, or the first accelerator that runs any tensors if the main device runs none."""
    runs = zip(groups, placement.execution, strict=True)
    used = [key for group, key in runs if group.nbytes and is_accelerator(key)]
    return placement.main if placement.main in used or not used else used[0]


@dataclass(frozen=True)
class Item:
    """The bytes of one group of units that is to be placed.

    Attributes:
        weights: bytes on the device that stores the group.
        working: bytes of KV cache (and buffers) on the device that runs the group.
        units: the memory that its units take in slots, staging and caches if they are not stored where they run;
            without lookups, which stay where they are stored.
        can_stream: False if the host computes the group wherever it is not resident.
        pinned: it must be resident on the main device wherever there is one.
        lends: operations on the main device read its weights, so it must not be resident on another accelerator.
        offloaded: bytes on the device that it is streamed from if its weights are quantised on the link; None if not.
        packed: bytes in RAM if the host computes it packed; None if it does not.
    """

    weights: int
    working: int = 0
    units: tuple[PassingUnit, ...] = ()
    can_stream: bool = True
    pinned: bool = False
    lends: bool = False
    offloaded: int | None = None
    packed: int | None = None

    def may_take(self, option: tuple[Key, Key], main: Key) -> bool:
        """Return whether it may be stored and run on the devices of an option."""
        return not (self.lends and is_accelerator(option[0]) and option[0] != main)

    def stored_bytes(self, option: tuple[Key, Key]) -> int:
        """Return the bytes on the storage device under an option: a storage and an execution device."""
        if self.packed is self.offloaded is None:
            return self.weights
        storage, execution = option
        if self.packed is not None and storage == execution == HOST:
            return self.packed
        streamed = is_accelerator(execution) and not is_accelerator(storage)
        return self.offloaded if streamed and self.offloaded is not None else self.weights

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest slot that any of its units needs when streamed; 0 if none needs one."""
        return max((unit.whole_slot for unit in self.units), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes on a device that both stores and runs it, at most."""
        return max(self.weights, self.packed or 0) + self.working


def most_staging_bytes(readers: int, host_budget: int = 0) -> int:
    """Return the upper bound of the bytes through which blocks on disk reach an accelerator.

    Args:
        readers: number of threads that read: chunks of several are as large as those of `READERS`.
        host_budget: the host's budget in bytes, of which it is half at most; 0: there is none.
    """
    most = STAGING_BYTES * max(readers, READERS) // READERS
    return min(most, host_budget // 2 or most)


@dataclass(frozen=True)
class Capacity:
    """The budgets of the devices, and how they may be used.

    Attributes:
        budgets: bytes by device key, in the order to be filled; `"disk"` missing means unlimited.
        activations: bytes of activations to keep free on each device that runs something.
        slots: number of slots of a device if more than one unit is streamed to it.
        main_device: device of the inputs; None: the first accelerator with a budget. Groups are placed with all that is
            streamed on it; `spread` moves streamed units from there.
        host_compute: units may run on the CPU although accelerators run others.
        expert_cache: bytes of each device for experts that are fetched one by one; None: as many as slots for whole
            units with all their experts would take.
        readers: number of threads that read from disk.
        caching: devices whose allocators cache: what they reserve counts, and not the bytes of tensors alone.
    """

    budgets: Mapping[Key, int]
    activations: int = 0
    slots: int = DEFAULT_SLOTS
    main_device: Key | None = None
    host_compute: bool = False
    expert_cache: int | None = None
    readers: int = READERS
    caching: Mapping[Key, CachingMemory] = field(default_factory=dict)

    @cached_property  # searches ask for it hundreds of thousands of times
    def accelerators(self) -> list[Key]:
        """Keys of the accelerators with a budget, in order."""
        return [key for key, size in self.budgets.items() if size > 0 and is_accelerator(key)]

    @property
    def staging_bytes(self) -> int:
        """Bytes of the host through which blocks on disk reach an accelerator, at most: half of a small budget."""
        return most_staging_bytes(self.readers, self.budgets.get(HOST, 0))

    @cached_property
    def main(self) -> Key:
        """The device on which streamed units run."""
        if self.main_device is not None:
            return self.main_device
        return self.accelerators[0] if self.accelerators else HOST


@dataclass(frozen=True)
class GroupPlacement:
    """Storage and execution device of each group.

    Attributes:
        storage: device key on which each item lies.
        execution: device key on which each item runs; differs from `storage` for what is streamed or viewed on disk.
        main: device of the inputs, on which streamed items run.
        slots: how many slots are reserved on `main`.
        slot_bytes: bytes of one slot.
    """

    storage: tuple[Key, ...]
    execution: tuple[Key, ...]
    main: Key
    slots: int = 0
    slot_bytes: int = 0
