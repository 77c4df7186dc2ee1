"""Bytes reserved for weights stored elsewhere: slots of units, expert caches, read-ahead and staging.

`dispatch` reserves exactly these bytes. The experts of a mixture are fetched one by one, when a router has chosen them,
and stay until their bytes are needed; unless the plan says otherwise they get what whole units with all their experts
would take, less the slots of the rest of these units.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ...devices import DISK, HOST
from ...limits import DEFAULT_SLOTS, NEARLY_ALL_EXPERTS, READ_AHEAD_BYTES, STAGING_BYTES
from ...profile import Profile, UnitProfile
from ...profile.model.experts import ExpertsProfile, RouterChoice
from ...profile.model.quantized import staging_bytes
from ..result.budgets import Key
from .assignment import Assignment


@dataclass(frozen=True)
class ExpertCapacity:
    """How many experts of one kind a device has memory for.

    Attributes:
        slots: how many experts there is room for.
        experts: how many experts, of all modules together, share it.
        expert_bytes: bytes of one.
    """

    slots: int
    experts: int
    expert_bytes: int

    def brought(self, choice: RouterChoice) -> tuple[float, float]:
        """Return how many experts of one module are brought in one call: ahead of it, and once they are chosen.

        Where a call wants nearly all, those of the next module come while this one's are computed with, as far as there
        is room for both. Where it wants a few, the chance that one is there is the share of experts that are.
        """
        if self.slots >= self.experts:
            return 0.0, 0.0
        if choice.wanted < NEARLY_ALL_EXPERTS * choice.count:
            return 0.0, choice.wanted * (1 - self.slots / self.experts)
        missing = choice.wanted * (1 - max(self.slots - 2 * choice.count, 0) / self.experts)
        ahead = min(missing, float(max(self.slots - choice.count, 0)))
        return ahead, missing - ahead


def slots_on(profile: Profile, assignment: Assignment, device: Key) -> int:
    """Return the bytes on `device` of slots, restore buffers and experts; `MemoryUsage` adds read-ahead and staging."""
    rooms = {id(room): room for room in _rooms(profile, assignment, device).values()}
    nbytes = sum(room.slots * room.expert_bytes for room in rooms.values())
    if device == assignment.main:
        streamed = [unit for index, unit in enumerate(profile.units) if assignment.streamed(index)]
        nbytes += _whole_slots(profile, assignment) + staging_bytes(streamed, profile.offload_dtype)
    return nbytes


def expert_capacities(profile: Profile, assignment: Assignment) -> dict[tuple[int, int], ExpertCapacity]:
    """Return the room of experts that come one by one, by positions of their unit and of the experts in it."""
    if not any(unit.experts for unit in profile.units):
        return {}
    main = assignment.main
    return {**_rooms(profile, assignment, main), **(_rooms(profile, assignment, HOST) if main != HOST else {})}


def expert_cache(profile: Profile, assignment: Assignment) -> dict[Key, int]:
    """Return the bytes that experts fetched one by one may take, by device; a device they never come to is missing."""
    units = range(len(profile.units))
    return {
        device: _expert_bytes(profile, assignment)
        for device in dict.fromkeys([assignment.main, HOST])
        if any(profile.units[index].experts and _comes_to(assignment, index, device) for index in units)
    }


def share_cache(nbytes: int, kinds: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many experts of each kind there is room for in a cache of `nbytes` bytes: at least one each.

    Args:
        nbytes: what all kinds together may take.
        kinds: of each, the bytes of one expert and how many there are.
    """
    whole = sum(size * count for size, count in kinds)
    rooms = [int(nbytes * (size * count / whole)) // max(size, 1) for size, count in kinds]
    return [max(1, min(room, count)) for room, (_, count) in zip(rooms, kinds, strict=True)]


def _rooms(profile: Profile, assignment: Assignment, device: Key) -> dict[tuple[int, int], ExpertCapacity]:
    found = {
        (index, position): experts
        for index, unit in enumerate(profile.units)
        if _comes_to(assignment, index, device)
        for position, experts in enumerate(unit.experts)
    }
    kinds: dict[tuple[tuple[str, int], ...], list[ExpertsProfile]] = {}
    for experts in found.values():
        kinds.setdefault(experts.slots, []).append(experts)
    if not kinds:
        return {}
    sizes = [(kind[0].nbytes, sum(experts.count for experts in kind)) for kind in kinds.values()]
    shares = share_cache(_expert_bytes(profile, assignment), sizes)
    rooms = {
        slots: ExpertCapacity(n, count, size) for slots, n, (size, count) in zip(kinds, shares, sizes, strict=True)
    }
    return {at: rooms[experts.slots] for at, experts in found.items()}


def _comes_to(assignment: Assignment, index: int, device: Key) -> bool:
    """Whether the experts of a unit are brought to `device`; to the host from disk, where each is a file's part."""
    if assignment.streamed(index):
        return device == assignment.main
    return device == HOST and assignment.storage[index] == DISK and assignment.execution[index] == HOST


def _expert_bytes(profile: Profile, assignment: Assignment) -> int:
    """Return the bytes of each device that experts may take: what was asked for, else what is left of the room for
    whole streamed units, their experts included, beside the slots of what is streamed without experts."""
    if assignment.expert_cache is not None:
        return assignment.expert_cache
    slots = assignment.slots or DEFAULT_SLOTS
    whole = []
    for index, unit in enumerate(profile.units):
        streamed = assignment.streamed(index)
        rest = _slot_bytes(assignment, index, unit) if streamed else 0
        if unit.experts and (streamed or _comes_to(assignment, index, HOST)):
            rest += sum(experts.count * experts.nbytes for experts in unit.experts)
        whole.append(rest)
    rests = list(_slot_sizes(profile, assignment))
    return slots * max(whole, default=0) - min(slots, len(rests)) * max(rests, default=0)


def _whole_slots(profile: Profile, assignment: Assignment) -> int:
    """Return the bytes of the slots on the main device for what is streamed as a whole."""
    if not any(unit.experts and assignment.streamed(index) for index, unit in enumerate(profile.units)):
        return assignment.slots * assignment.slot_bytes
    rests = list(_slot_sizes(profile, assignment))
    return min(assignment.slots, len(rests)) * max(rests, default=0)


def _slot_sizes(profile: Profile, assignment: Assignment) -> Iterator[int]:
    """Yield the bytes of the slot of each streamed unit, its experts apart."""
    for index, unit in enumerate(profile.units):
        if assignment.streamed(index) and not unit.is_lookup and not unit.is_tensor:
            slot_bytes = _slot_bytes(assignment, index, unit)
            if slot_bytes:
                yield slot_bytes


def _slot_bytes(assignment: Assignment, index: int, unit: UnitProfile) -> int:
    return unit.slot_bytes_without_experts(assignment.stream_buffers or index in assignment.computed_below)


def read_ahead_window(blocks: Collection[int], ahead: int = READ_AHEAD_BYTES) -> int:
    """Return the least memory that weights on disk are run in: the largest block, and the beginning of the next one.

    Args:
        blocks: bytes of each block that is brought in as a whole.
        ahead: bytes of the next one, at most.
    """
    largest = max(blocks, default=0)
    return min(sum(blocks), largest + min(largest, ahead))


def staging(blocks: Collection[int], most: int = STAGING_BYTES) -> int:
    """Return the host memory that weights on disk are staged in on their way to an accelerator.

    Args:
        blocks: bytes of each block that is streamed from disk.
        most: bytes it takes at most.
    """
    return min(sum(blocks), 2 * max(blocks, default=0), most)
