"""Predicted seconds of one unit: to compute, to fetch its weights and experts, to transfer its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from ...devices import DISK, HOST
from ...limits import CACHED_SHARE
from ...profile import Profile, UnitProfile
from ...profile.machine.machine import MachineProfile
from ...profile.model.quantized import offloaded_bytes
from ...profile.trace.events import OUTSIDE, Allocate, Enter, Leave
from ...profile.trace.trace import Trace
from ...profile.trace.work import PRODUCT, Work
from ..result.budgets import Key, device_name, is_accelerator

Option = tuple[Key, Key]
"""Storage and execution device of a unit."""


class UnitCost:
    """Seconds of a profile's units on one machine.

    Args:
        profile: the model.
        machine: the machine.
    """

    def __init__(self, profile: Profile, machine: MachineProfile) -> None:
        self.profile = profile
        self.machine = machine
        self.works = [phase.trace.work() for phase in profile.phases]
        self.choices = [phase.trace.choices() for phase in profile.phases]
        self.expert_works = [phase.trace.expert_works() for phase in profile.phases]
        self._works_from_host = [
            None if phase.from_host is None else phase.from_host.work() for phase in profile.phases
        ]
        self._works_packed = [None if phase.packed is None else phase.packed.trace.work() for phase in profile.phases]
        self.input_transfers = [InputTransfers(phase.trace) for phase in profile.phases]
        self._known: dict[tuple[int, int, Key, bool, bool], float] = {}
        self._of_works: dict[tuple[int, Key], float] = {}  # by `id` of works, which layers of one kind share
        self._names: dict[Key, str] = {}

    @cached_property
    def cached_share(self) -> float:
        """Share of the weights that stays in the processor's last-level cache from one pass to the next."""
        cache = max(self.machine.cache_bytes, 1)
        return min(1.0, max(0.0, 2.0 - self.profile.weights / (0.75 * cache)))

    def compute(self, phase: int, unit: int, execution: Key, from_host: bool = False, packed: bool = False) -> float:
        """Return the seconds that `unit` computes on a device that already has its weights.

        Args:
            phase: number of the phase.
            unit: position of the unit; `OUTSIDE`: operations between units.
            execution: the device it runs on.
            from_host: the model's main device is the host: see `Phase.from_host`.
            packed: the host computes it packed, if that was recorded: see `Phase.packed`.
        """
        other = self._works_packed[phase] if packed else None
        packed = other is not None
        if other is None and from_host:
            other = self._works_from_host[phase]
        key = (phase, unit, execution, other is not None, packed)
        if key not in self._known:
            works = (self.works[phase] if other is None else other).get(unit, ())
            shared = id(works), execution
            if shared not in self._of_works:
                self._of_works[shared] = self.of_works(works, execution)
            self._known[key] = self._of_works[shared]
        return self._known[key]

    @cached_property
    def separate(self) -> set[int]:
        """As `separate_units`, of the profile's."""
        return separate_units(self.profile.units)

    def least_compute(self, phase: int, unit: int, execution: Key) -> float:
        """Return a lower bound of `compute`, wherever other units are held."""
        least = min(self.compute(phase, unit, execution, from_host) for from_host in (False, True))
        return min(least, self.compute(phase, unit, execution, packed=True)) if execution == HOST else least

    def of_works(self, works: Sequence[Work], execution: Key) -> float:
        """Return the seconds of a sequence of operations on a device."""
        speed, share = self.machine.device(self.name(execution)), self.cached_share
        cold = speed.total(works) if share < 1 else 0.0
        return cold if not share else (1 - share) * cold + share * speed.total(works, cached=True)

    def fetch(
        self,
        phase: int,
        unit: int,
        option: Option,
        on_disk: int,
        with_buffers: bool = False,
        experts: float | None = None,
    ) -> float:
        """Return the seconds in which the link transfers a streamed unit's weights; 0 for a unit that is not streamed.

        Args:
            phase: number of the phase.
            unit: position of the unit.
            option: the devices that hold and run it.
            on_disk: bytes of all weights on disk.
            with_buffers: its buffers are streamed with it.
            experts: bytes of its experts that are fetched with it; None: of all that a pass chooses.
        """
        storage, execution = option
        if is_accelerator(storage) or not is_accelerator(execution):
            return 0.0
        profile = self.profile.units[unit]
        if experts is None:
            experts = sum(
                choice.wanted * profile.experts[position].nbytes
                for position, choice in self.choices[phase].get(unit, {}).items()
            )
        offload_dtype = self.profile.offload_dtype
        stored = profile.weights if offload_dtype is None else offloaded_bytes(profile, offload_dtype)
        weights = stored - profile.expert_weights + experts
        nbytes = weights + (profile.buffers if with_buffers else 0)
        if not nbytes:
            return 0.0
        seconds = self.machine.link(self.name(execution)).to_device.seconds(int(nbytes))
        return max(seconds, nbytes / self.disk_rate(on_disk)) if storage == DISK else seconds

    def kv_transfer(self, unit: int, execution: Key, in_step: bool) -> float:
        """Return the seconds in which the link transfers keys and values that a unit has on the host, at full context:
        to the device for a step, to the host for a prompt."""
        link, nbytes = self.machine.link(self.name(execution)), self.profile.kv_on_host[unit]
        return (link.to_device if in_step else link.to_host).seconds(nbytes)

    def disturbance(self, unit: int, execution: Key, ahead: float = 0.0) -> float:
        """Return the seconds by which its own copies slow down the compute that overlaps with them.

        Args:
            unit: position of the unit.
            execution: the device it runs on.
            ahead: bytes of its experts that are fetched before they are chosen.
        """
        profile = self.profile.units[unit]
        whole = profile.weights - profile.expert_weights if is_accelerator(execution) else 0
        return (whole + ahead) * self.machine.link(self.name(execution)).disturbance

    def fetch_on_demand(self, nbytes: float, option: Option, on_disk: int) -> float:
        """Return the seconds that a unit waits for `nbytes` of experts that its router has chosen."""
        storage, execution = option
        if not nbytes:
            return 0.0
        copied = self.machine.link(self.name(execution)).to_device.seconds(int(nbytes))
        from_disk = nbytes / self.disk_rate(on_disk) if storage == DISK else 0.0
        return max(copied, from_disk) if is_accelerator(execution) else copied + from_disk

    def expert_seconds(self, phase: int, unit: int, position: int, execution: Key) -> float:
        """Return the seconds of the products of one of the experts that a call chooses.

        Args:
            phase: number of the phase.
            unit: position of the unit.
            position: position of the experts in the unit.
            execution: the device that computes them.
        """
        route, works = self.expert_works[phase][unit][position]
        products = [work for work in works if work.kind == PRODUCT]
        return self.of_works(products, execution) / max(route.choice.wanted, 1.0)

    def expert_overhead(self, phase: int, unit: int) -> float:
        """Return the seconds of Python for looking up and holding the chosen experts of a unit."""
        choices = self.choices[phase].get(unit, {}).values()
        return sum(self.machine.expert_overhead.seconds(choice) for choice in choices)

    def crossings(self, inputs: Inputs, source: Key, execution: Key) -> tuple[float, float]:
        """Return the seconds of a transfer of inputs on the source's link, and on the link of the device they go to.

        Accelerators of one kind copy directly to each other, if that was measured, and otherwise through the host.
        """
        one, other = self.name(source), self.name(execution)
        peer = self.machine.link(one).to_peer if one.partition(":")[0] == other.partition(":")[0] else None
        if peer is None:
            return self.to_host(inputs, source), self.from_host(inputs, execution)
        return peer.seconds(inputs.nbytes) + (inputs.tensors - 1) * peer.latency, 0.0

    def to_host(self, inputs: Inputs, source: Key) -> float:
        """Return the seconds of the transfer of inputs from a device to the host."""
        if not is_accelerator(source):
            return 0.0
        link = self.machine.link(self.name(source)).to_host
        return link.seconds(inputs.nbytes) + (inputs.tensors - 1) * link.latency

    def from_host(self, inputs: Inputs, execution: Key) -> float:
        """Return the seconds of the transfer of inputs from the host to a device, once the link is free."""
        if not is_accelerator(execution):
            return 0.0
        link = self.machine.link(self.name(execution)).to_device_pageable
        return link.seconds(inputs.nbytes) + (inputs.tensors - 1) * link.latency

    def disk_rate(self, on_disk: int) -> float:
        """Return the bytes per second at which weights are read, when `on_disk` bytes of them are on disk."""
        return self.machine.disk_warm if self.fits_page_cache(on_disk) else self.machine.disk_cold

    def fits_page_cache(self, on_disk: int) -> bool:
        """Whether files of `on_disk` bytes stay in memory from one pass to the next."""
        return on_disk <= CACHED_SHARE * self.machine.memory_bytes

    def name(self, key: Key) -> str:
        """Return the canonical name of a device key."""
        if key not in self._names:
            self._names[key] = device_name(key)
        return self._names[key]


def separate_units(units: Sequence[UnitProfile]) -> set[int]:
    """Return the units that share no tensor with others and are fetched whole, unlike lookups and experts: each of them
    may run on a device of its own."""
    holders = Counter(storage for unit in units for storage in unit.storages)
    return {
        index
        for index, unit in enumerate(units)
        if unit.weights
        and not (unit.is_lookup or unit.is_tensor or unit.experts)
        and all(holders[storage] == 1 for storage in unit.storages)
    }


Producer = tuple[int, bool]
"""The unit that computed a tensor, and whether it is among the outputs of the unit."""

NO_PRODUCER: Producer = (OUTSIDE, False)


class Inputs(NamedTuple):
    """The inputs of a unit that one other unit computed.

    Attributes:
        producer: position of the unit that computed them; `OUTSIDE`: operations between units, on the main device.
        tensors: number of tensors.
        nbytes: bytes of all of them.
        returned: they are outputs that have been moved to the main device.
    """

    producer: int
    tensors: int
    nbytes: int
    returned: bool = False


class InputTransfers:
    """The inputs of every unit in a trace, and those that are transferred under an assignment.

    Args:
        trace: one forward.

    Attributes:
        returned: by unit, its outputs that are moved to the main device as soon as it has computed them.
    """

    def __init__(self, trace: Trace) -> None:
        self._inputs: dict[int, tuple[Inputs, ...]] = {}
        self.returned: dict[int, Inputs] = {}
        producers = {held.storage: (held.unit, False) for held in trace.initial}
        running = [OUTSIDE]
        for event in trace.outline:
            if isinstance(event, Allocate):
                outside = running[-1] == OUTSIDE
                producers[event.storage] = producers.get(event.source, NO_PRODUCER) if outside else (running[-1], False)
            elif isinstance(event, Enter):
                self._inputs.setdefault(event.unit, _by_producer(event, producers))
                running.append(event.unit)
            elif isinstance(event, Leave):
                running.pop()
                made = {
                    storage: size for storage, size in event.outputs if producers.get(storage) == (event.unit, False)
                }
                to = producers.get(event.source, NO_PRODUCER) if event.source is not None else (event.unit, True)
                producers.update(dict.fromkeys(made, to))
                if made and event.source is None:
                    before = self.returned.get(event.unit, Inputs(event.unit, 0, 0, returned=True))
                    sizes = before.tensors + len(made), before.nbytes + sum(made.values())
                    self.returned[event.unit] = Inputs(event.unit, *sizes, returned=True)

    def may_cross(self, execution: Sequence[Key], main: Key) -> set[int]:
        """Return the units that may have inputs on other devices: those off the main device, and those that read what
        these make. The arguments are those of `from_elsewhere`, which it saves calls of."""
        away = {unit for unit, key in enumerate(execution) if key != main}
        return away.union(*(self._readers[unit] for unit in away if unit in self._readers))

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """The units that read what each unit makes, where that is."""
        found: dict[int, set[int]] = {}
        for unit, read in self._inputs.items():
            for inputs in read:
                found.setdefault(inputs.producer, set()).add(unit)
        return found

    def sources(self, unit: int, execution: Sequence[Key], main: Key) -> tuple[Key, ...]:
        """Return the device of each of the inputs of `unit`; none if all are where it runs. The arguments are those of
        `from_elsewhere`, whose result follows from this."""
        found = tuple([main if producer < 0 else execution[producer] for producer in self._producers.get(unit, ())])
        return () if found.count(execution[unit]) == len(found) else found

    @cached_property
    def _producers(self) -> dict[int, tuple[int, ...]]:
        """Of each unit, those on whose devices its inputs are; `OUTSIDE`: the main device."""
        return {
            unit: tuple(OUTSIDE if inputs.returned else inputs.producer for inputs in read)
            for unit, read in self._inputs.items()
        }

    def from_elsewhere(self, unit: int, execution: Sequence[Key], main: Key) -> list[tuple[Key, Inputs]]:
        """Return the inputs of `unit` that are not on the device it runs on, each with the device they are on.

        Args:
            unit: position of the unit.
            execution: execution device of each unit.
            main: the device of the model's own inputs, and of outputs that are moved there.
        """
        found = []
        for inputs in self._inputs.get(unit, ()):
            source = main if inputs.producer == OUTSIDE else execution[inputs.producer]
            if inputs.returned:
                source = main
            if source != execution[unit]:
                found.append((source, inputs))
        return found


def _by_producer(event: Enter, producers: Mapping[int, Producer]) -> tuple[Inputs, ...]:
    sizes: dict[Producer, list[int]] = {}
    for storage, nbytes in event.inputs:
        sizes.setdefault(producers.get(storage, NO_PRODUCER), []).append(nbytes)
    return tuple(Inputs(unit, len(found), sum(found), back) for (unit, back), found in sizes.items())
