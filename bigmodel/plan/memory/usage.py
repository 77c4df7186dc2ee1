"""`MemoryUsage`: the bytes that a placement takes on each device, by purpose.

The search, the exact evaluation, the cost model, training plans and reports all count with it. Units that are not
stored where they run pass through memory that they share: slots and restore buffers of each accelerator that streams,
expert caches of the main device, the read-ahead window, staging and expert caches of the host. `dispatch` reserves
exactly these bytes. Experts that are fetched one by one go to the main device or the host, and to no other accelerator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ...devices import DISK, HOST
from ...limits import DEFAULT_SLOTS, NEARLY_ALL_EXPERTS, READ_AHEAD_BYTES, READERS, RESTORE_BUFFERS, STAGING_BYTES
from ...profile import UnitProfile
from ...profile.model.experts import RouterChoice
from ...profile.model.quantized import offloaded_bytes, restored_bytes
from ..result.budgets import Key, is_accelerator
from ..result.plan import DevicePlan
from .staging import staging

WEIGHTS, BUFFERS, KV_CACHE, ACTIVATIONS = "weights", "buffers", "kv_cache", "activations"
SLOTS, TRAINING, WORKSPACE, UNUSED = "slots", "training", "workspace", "unused"
"""Purposes of bytes: the fields of `DevicePlan`."""

ExpertKind = tuple[tuple[str, int], ...]
"""Bytes of one expert in each fused tensor, by name. Experts of one kind share a cache."""


@dataclass(frozen=True)
class PassingUnit:
    """The bytes of a unit that is not stored where it runs, in each memory that it may pass through.

    Attributes:
        slot: bytes of its slot on an accelerator, without experts that are fetched one by one.
        experts: kind and number of these experts, for each module in it that has any.
        arriving: bytes of its quantised weights in a restore buffer; 0 if they are not quantised.
        scratch: bytes of scratch memory while these are restored.
        staged: bytes of it that reach an accelerator from disk as a whole, without these experts.
        viewed: bytes of the host through which it is read where the host computes it from disk.
    """

    slot: int = 0
    experts: tuple[tuple[ExpertKind, int], ...] = ()
    arriving: int = 0
    scratch: int = 0
    staged: int = 0
    viewed: int = 0

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of all its experts that are fetched one by one."""
        return sum(count * _bytes_of(kind) for kind, count in self.experts)

    @property
    def whole_slot(self) -> int:
        """Bytes of a slot that holds all its experts, too."""
        return self.slot + self.expert_bytes

    @cached_property
    def _hash(self) -> int:
        return hash((self.slot, self.experts, self.arriving, self.scratch, self.staged, self.viewed))

    def __hash__(self) -> int:
        return self._hash


def passing_unit(
    unit: UnitProfile, offload_dtype: str | None = None, with_buffers: bool = False, reads: bool = True
) -> PassingUnit:
    """Return the bytes of a unit in each memory that it may pass through.

    Args:
        unit: not a lookup; a tensor that a split module holds itself has no slot.
        offload_dtype: dtype that its weights are quantised to on the link; None: they are not.
        with_buffers: its buffers are streamed with it.
        reads: False if its execution is unknown, so memory for reading it from disk is not counted.
    """
    stored, arriving, scratch = unit.weights - unit.expert_weights, 0, 0
    if offload_dtype is not None:
        stored = offloaded_bytes(unit, offload_dtype, experts=False)
        arriving, scratch = (0, 0) if unit.is_tensor else restored_bytes(unit, offload_dtype)
    found = PassingUnit(
        slot=0 if unit.is_tensor else unit.slot_bytes_without_experts(with_buffers),
        experts=tuple((experts.slots, experts.count) for experts in unit.experts),
        arriving=arriving,
        scratch=scratch,
        staged=stored if reads else 0,
        viewed=unit.weights - unit.expert_weights if reads else 0,
    )
    return _one_of(found)


@lru_cache(maxsize=1024)
def _one_of(unit: PassingUnit) -> PassingUnit:
    """Return one object for all equal units: searches look them up in dictionaries many times."""
    return unit


class ExpertCapacity(NamedTuple):
    """The capacity of a device's cache for experts of one kind.

    Attributes:
        slots: number of experts that it holds at once.
        experts: number of experts, of all modules together, that share it.
        expert_bytes: bytes of one expert.
    """

    slots: int
    experts: int
    expert_bytes: int

    def fetched(self, choice: RouterChoice, reuse: float = 0.0) -> tuple[float, float]:
        """Return the expected numbers of experts of a module that are fetched in one call: ahead of it, and on demand.

        If calls use nearly all experts, those of the next module are fetched while this one computes, as far as the
        cache holds both. Otherwise, the probability that an expert is cached is the share of experts that are, but for
        those that are there as routers choose again.

        Args:
            choice: what the module's router chooses.
            reuse: the share of these.
        """
        if self.slots >= self.experts:
            return 0.0, 0.0
        if choice.wanted < NEARLY_ALL_EXPERTS * choice.count:
            return 0.0, choice.wanted * (1 - reuse) * (1 - self.slots / self.experts)
        missing = choice.wanted * (1 - max(self.slots - 2 * choice.count, 0) / self.experts)
        ahead = min(missing, float(max(self.slots - choice.count, 0)))
        return ahead, missing - ahead


class MemoryUsage:
    """Bytes of each device by purpose. Everything that is added can be removed again, in any order.

    The memory that passing units share depends on all of them, so it is computed from those present.

    Args:
        main: the device of the inputs, to which experts are fetched one by one.
        slots: maximum number of slots of each device that units are streamed to.
        staging_bytes: bytes of the host through which units on disk reach one accelerator, at most.
        expert_cache: bytes of each device for experts that are fetched one by one; None: those of slots for whole units
            with all their experts, less those of slots without experts.
        readers: number of threads that read from disk for one accelerator.

    Attributes:
        limited: devices that keep to their budgets only if their allocators give cached memory back.
    """

    def __init__(
        self,
        main: Key,
        slots: int = 0,
        staging_bytes: int = STAGING_BYTES,
        expert_cache: int | None = None,
        readers: int = READERS,
    ) -> None:
        self.main = main
        self._most_slots = slots
        self._most_staging = staging_bytes
        self._readers = readers
        self._expert_cache = expert_cache
        self._bytes: dict[Key, dict[str, int]] = {}
        # By the device that they are streamed to.
        self._streamed: dict[Key, Counter[PassingUnit]] = defaultdict(Counter, {main: Counter()})
        self._staged: dict[Key, Counter[PassingUnit]] = defaultdict(Counter)
        self._viewed: Counter[PassingUnit] = Counter()
        self._shared: dict[Key, int] = {}
        self.limited: set[Key] = set()

    def add(self, device: Key, purpose: str, nbytes: int) -> None:
        """Add bytes of one purpose to a device; a negative number removes them."""
        purposes = self._bytes.setdefault(device, {})
        purposes[purpose] = purposes.get(purpose, 0) + nbytes

    def add_unit(self, unit: PassingUnit, storage: Key, execution: Key, count: int = 1) -> None:
        """Add a unit to those that share memory, or several equal ones, unless it is stored where it runs."""
        for present in self._passed(storage, execution):
            present[unit] += count
        self._forget(execution)

    def remove_unit(self, unit: PassingUnit, storage: Key, execution: Key) -> None:
        """Remove a unit that `add_unit` added."""
        for present in self._passed(storage, execution):
            present[unit] -= 1
            if not present[unit]:
                del present[unit]
        self._forget(execution)

    def _forget(self, execution: Key) -> None:
        """Forget the bytes through which units pass where one that runs on a device changes them."""
        for device in (execution, self.main, HOST):
            self._shared.pop(device, None)

    def _passed(self, storage: Key, execution: Key) -> list[Counter[PassingUnit]]:
        if is_accelerator(execution) and not is_accelerator(storage):
            streamed = self._streamed[execution]
            return [streamed, self._staged[execution]] if storage == DISK else [streamed]
        return [self._viewed] if storage == DISK and execution == HOST else []

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for any of the streamed units with all its experts."""
        return max(map(self._slot_bytes_on, self._streamed))

    @property
    def slots(self) -> int:
        """Number of slots that the streamed units need, on the device that needs most."""
        return max(map(self._slots_on, self._streamed))

    def _slot_bytes_on(self, device: Key) -> int:
        return max((unit.whole_slot for unit in self._streamed[device]), default=0)

    def _slots_on(self, device: Key) -> int:
        turns = sum(count for unit, count in self._streamed[device].items() if unit.whole_slot)
        return min(turns, self._most_slots)

    @property
    def expert_cache(self) -> dict[Key, int]:
        """Bytes that experts may take on each device to which they are fetched one by one."""
        fetched = {self.main: self._streamed[self.main], HOST: self._viewed}
        cached = [device for device, units in fetched.items() if any(unit.experts for unit in units)]
        return dict.fromkeys(cached, self._expert_bytes)

    def expert_capacities(self, device: Key) -> dict[ExpertKind, ExpertCapacity]:
        """Return the capacity of a device's cache for each kind of experts."""
        counts: Counter[ExpertKind] = Counter()
        for fetched_to, units in ((self.main, self._streamed[self.main]), (HOST, self._viewed)):
            for unit, number in units.items() if fetched_to == device else ():
                for kind, count in unit.experts:
                    counts[kind] += number * count
        if not counts:
            return {}
        sizes = [(_bytes_of(kind), count) for kind, count in counts.items()]
        shares = share_cache(self._expert_bytes, sizes)
        return {
            kind: ExpertCapacity(slots, count, size)
            for kind, slots, (size, count) in zip(counts, shares, sizes, strict=True)
        }

    @property
    def devices(self) -> list[Key]:
        """Devices that take any bytes, in the order these were added."""
        streaming = [device for device, units in self._streamed.items() if units]
        passing = [HOST] if self._viewed or any(self._staged.values()) else []
        return list(dict.fromkeys([*self._bytes, *streaming, *passing]))

    def of(self, device: Key, purpose: str) -> int:
        """Return the bytes of a device for one purpose."""
        nbytes = self._bytes.get(device, {}).get(purpose, 0)
        return nbytes + self._passing(device) if purpose == SLOTS else nbytes

    def total(self, device: Key) -> int:
        """Return the bytes of a device for all purposes."""
        return sum(self._bytes.get(device, {}).values()) + self._passing(device)

    def tensors(self, device: Key) -> int:
        """Return the bytes of a device without those of libraries, and those that its allocator reserves beyond."""
        return self.total(device) - self.of(device, UNUSED) - self.of(device, WORKSPACE)

    def device_plans(self) -> dict[Key, DevicePlan]:
        """Return the bytes of every device that takes any, without a budget."""
        purposes = (WEIGHTS, BUFFERS, KV_CACHE, ACTIVATIONS, WORKSPACE, SLOTS, TRAINING, UNUSED)
        return {
            device: DevicePlan(
                device,
                budget=None,
                limited=device in self.limited,
                **{purpose: self.of(device, purpose) for purpose in purposes},
            )
            for device in self.devices
        }

    def shared_tensors(self, device: Key) -> list[int]:
        """Return the bytes of each tensor on an accelerator through which units pass: slots, caches of experts, and
        what quantised weights are restored in."""
        caches = self.expert_capacities(device).values() if device == self.main else ()
        found = [cache.slots * cache.expert_bytes for cache in caches]
        streamed = self._streamed.get(device)
        if not streamed:
            return found
        restored = RESTORE_BUFFERS * max(unit.arriving for unit in streamed) + max(unit.scratch for unit in streamed)
        largest, turns = self._slots_for_whole_units(device)
        return [*[largest] * turns, *found, *([restored] if restored else [])]

    def over(self, budgets: Mapping[Key, int]) -> dict[Key, int]:
        """Return the bytes by which devices exceed their budgets, without devices that keep to theirs."""
        devices = dict.fromkeys([*self._bytes, *self._streamed, HOST])
        excess = {device: self.excess(device, budgets) for device in devices}
        return {device: nbytes for device, nbytes in excess.items() if nbytes > 0}

    def excess(self, device: Key, budgets: Mapping[Key, int]) -> int:
        """Return the bytes by which a device exceeds its budget; 0 or less if it keeps to it.

        The disk is unlimited unless it has a budget. A host without a budget stores no unit, but units pass through it.
        """
        budget = budgets.get(device, 0)
        if device == DISK and device not in budgets:
            return 0
        held = sum(self._bytes.get(device, {}).values())
        return held - budget + (0 if device == HOST and not budget else self._passing(device))

    def _passing(self, device: Key) -> int:
        """Return the bytes of a device through which units held elsewhere pass."""
        if device not in self._shared:
            self._shared[device] = self._new_passing(device)
        return self._shared[device]

    def _new_passing(self, device: Key) -> int:
        caches = self.expert_capacities(device).values() if device in (self.main, HOST) else ()
        nbytes = sum(cache.slots * cache.expert_bytes for cache in caches)
        streamed = self._streamed.get(device)
        if streamed:
            arriving, scratch = max(unit.arriving for unit in streamed), max(unit.scratch for unit in streamed)
            nbytes += self._slots_without_experts(device) + RESTORE_BUFFERS * arriving + scratch
        if device == HOST and self._viewed:
            nbytes += read_ahead_window([unit.viewed for unit in self._viewed.elements()])
        if device == HOST:
            nbytes += sum(staging(blocks, self._most_staging, self._readers) for blocks in self._read_blocks())
        return nbytes

    def _read_blocks(self) -> Iterator[list[int]]:
        """Yield the bytes of the blocks, or experts, that each reader of files reads: each accelerator has one, as no
        link waits for another, and so has each cache of experts."""
        for units in self._staged.values():
            yield [unit.staged for unit in units.elements()]
        for fetched in ([self._viewed], self._staged.values()):
            layers: defaultdict[ExpertKind, list[int]] = defaultdict(list)
            for units in fetched:
                for unit in units.elements():
                    for kind, count in unit.experts:
                        layers[kind] += [_bytes_of(kind)] * min(count, 2)  # of more, two are staged
            yield from layers.values()

    def _slots_without_experts(self, device: Key) -> int:
        """Bytes of a device's slots for what is streamed as a whole."""
        largest, turns = self._slots_for_whole_units(device)
        return turns * largest

    def _slots_for_whole_units(self, device: Key) -> tuple[int, int]:
        """The bytes of a device's slot for what is streamed as a whole, and how many there are."""
        streamed = self._streamed[device]
        turns = sum(count for unit, count in streamed.items() if unit.slot)
        return max((unit.slot for unit in streamed), default=0), min(self._most_slots, turns)

    @property
    def _expert_bytes(self) -> int:
        """Bytes that the expert caches of one device may take together."""
        if self._expert_cache is not None:
            return self._expert_cache
        computed = max((unit.expert_bytes for unit in self._viewed), default=0)
        slots, slot_bytes = self._slots_on(self.main) or DEFAULT_SLOTS, self._slot_bytes_on(self.main)
        return slots * max(slot_bytes, computed) - self._slots_without_experts(self.main)


def _bytes_of(kind: ExpertKind) -> int:
    return sum(nbytes for _, nbytes in kind)


def share_cache(nbytes: int, kinds: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of experts of each kind in a cache of `nbytes` bytes, at least one each.

    Args:
        nbytes: bytes of all kinds together.
        kinds: of each, the bytes of one expert and how many there are.
    """
    whole = sum(size * count for size, count in kinds)
    shares = [int(nbytes * (size * count / whole)) // max(size, 1) for size, count in kinds]
    return [max(1, min(share, count)) for share, (_, count) in zip(shares, kinds, strict=True)]


def read_ahead_window(blocks: Collection[int], ahead: int = READ_AHEAD_BYTES) -> int:
    """Return the host's memory for computing with weights on disk: the largest block and a part of the next.

    Args:
        blocks: bytes of each block that is read as a whole.
        ahead: bytes of the next one, at most.
    """
    largest = max(blocks, default=0)
    return min(sum(blocks), largest + min(largest, ahead))
