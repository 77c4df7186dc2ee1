"""Predicted seconds of an assignment: of one pass (`CostModel`), and of a plan's objective (`Objective`).

In a pass links fetch some units while others compute. Units compute one after another, in order; meanwhile the link of
each accelerator fetches those that are streamed to it into slots, one after another. With two slots or more, the fetch
of a device's next streamed unit is queued when its one before is entered; with one slot, when the unit itself is
entered. A link serves requests in order: a unit's inputs, however few bytes, wait for the weights queued before them.
Links do not wait for each other, but share the disk. The streamers of `dispatch` do the same, pass after pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

from ...devices import DISK, HOST
from ...limits import UNKNOWN_NEW_TOKENS
from ...profile import Profile
from ...profile.machine.machine import MachineProfile
from ...profile.trace.events import OUTSIDE
from ..memory.assignment import STEP, Assignment, KnownUnits, expert_capacities
from ..memory.host_kv import fetched_kv, kv_on_disk
from ..memory.usage import ExpertCapacity
from ..result.budgets import Key, is_accelerator
from ..result.expert_split import ExpertSplit
from .unit_cost import UnitCost

PROMPT_SHARE = 1e-3
"""Weight of the prompt's seconds relative to a step's under "latency": it only breaks ties."""

PASSES = 3
"""Passes to simulate with one link; later passes take as long as the last one. Where several links wait for each other,
passes differ: then the mean of as many from the last one on counts."""

HITS_SETTLE = 4
"""Times that the hits of divided experts are computed from the division, and this from the hits."""


class Visit(NamedTuple):
    """One unit in a pass.

    Attributes:
        compute: seconds of its compute, and of transfers of its inputs over links of other devices.
        fetch: seconds in which the link fetches its weights; 0 if it is not streamed.
        on_demand: seconds in which the link fetches the experts that its router has chosen, while the unit waits.
        inputs: seconds in which the link transfers its inputs, before it computes.
        device: the device that it runs on, whose link this is.
        read: the part of `fetch` in which its weights are read from disk.
    """

    compute: float
    fetch: float = 0.0
    on_demand: float = 0.0
    inputs: float = 0.0
    device: Key = 0
    read: float = 0.0


def seconds_of_pass(visits: Sequence[Visit], slots: int, below: float = inf) -> float:
    """Return the seconds of one pass in a long sequence of passes.

    Args:
        visits: in the order of execution.
        slots: maximum number of fetched units on one device at once.
        below: a pass that takes at least as long is not simulated: a lower bound of its seconds is returned.
    """
    total = sum([compute + on_demand + inputs for compute, _, on_demand, inputs, _, _ in visits])
    fetched: dict[Key, list[int]] = {}
    for position, visit in enumerate(visits):
        if visit[1]:
            fetched.setdefault(visit.device, []).append(position)
    # As many as there are slots stay there from one pass to the next.
    turns = [positions for positions in fetched.values() if len(positions) > max(slots, 1)]
    if not turns:
        return total
    if slots < 2:
        return total + sum(visits[position].fetch for positions in turns for position in positions)
    busy = [sum(visits[position].fetch for position in positions) for positions in turns]
    read = sum(visits[position].read for positions in turns for position in positions)
    least = max(total, read, *busy)
    return least if least >= below else max(_simulated(visits, turns), read, *busy)


def _simulated(visits: Sequence[Visit], turns: Sequence[Sequence[int]]) -> float:
    """Return the seconds of a pass, of which each link fetches the positions in one member of `turns`."""
    following: list[float | None] = [None] * len(visits)  # seconds of the fetch that is queued at each position
    for positions in turns:
        for turn, position in enumerate(positions):
            following[position] = visits[positions[(turn + 1) % len(positions)]].fetch
    link_free = dict.fromkeys((visit.device for visit in visits), 0.0)
    arrived = {visits[positions[0]].device: visits[positions[0]].fetch for positions in turns}
    link_free.update(arrived)
    counted = 1 if len(turns) == 1 else PASSES
    now = started = 0.0
    for turn in range(PASSES - 1 + counted):
        if turn == PASSES - 1:
            started = now
        for (compute, _, on_demand, inputs, device, _), fetch in zip(visits, following, strict=True):
            if fetch is None and not (inputs or on_demand):
                now += compute
                continue
            free = link_free[device]  # not compared by `max`: searches run this hundreds of thousands of times
            if inputs:
                free = now = (free if free > now else now) + inputs
            if fetch is not None:
                # Its own fetch was queued before; the device's next one is queued now.
                free = (free if free > now else now) + fetch
                now, arrived[device] = max(now, arrived[device]), free
            if on_demand:
                free = now = (free if free > now else now) + on_demand
            link_free[device] = free
            now += compute
    return (now - started) / counted


@dataclass(frozen=True)
class StepTime:
    """The time of one pass, by resource.

    Attributes:
        seconds: the whole pass; less than the sum of the others if they overlap.
        compute: seconds of computing by device key.
        links: seconds in which the link of each accelerator transfers weights.
        disk: seconds in which weights are read from disk.
    """

    seconds: float
    compute: Mapping[Key, float] = field(default_factory=dict)
    links: Mapping[Key, float] = field(default_factory=dict)
    disk: float = 0.0

    @property
    def link(self) -> float:
        """Seconds in which the busiest link transfers weights."""
        return max(self.links.values(), default=0.0)

    @property
    def binds(self) -> str:
        """The bottleneck: the resource that is busy longest."""
        parts = {f"computing on {key}": seconds for key, seconds in self.compute.items()}
        parts.update({f"the link to device {key}": seconds for key, seconds in self.links.items()})
        parts["reading from disk"] = self.disk
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class _SharedState:
    """Properties of an assignment that the time of every unit depends on."""

    on_disk: int
    from_host: bool
    stream_buffers: bool
    split: ExpertSplit | None
    caches: Mapping[int, tuple[ExpertCapacity | None, ...]]
    kinds: Mapping[int, int]  # of each unit with caches, a number that is equal for equal ones


@dataclass(frozen=True)
class _UnitTime:
    """The time of one unit in a pass, without the transfer of its inputs."""

    compute: float
    visit: Visit
    disk: float


class CostModel:
    """Seconds of a profile's phases on one machine.

    Args:
        profile: the model.
        machine: the machine.

    Attributes:
        units: the seconds of single units.
    """

    def __init__(self, profile: Profile, machine: MachineProfile) -> None:
        self.profile = profile
        self.units = UnitCost(profile, machine)
        self._unit_times: dict[object, dict[object, _UnitTime]] = {}
        self._visits_with_inputs: dict[object, Visit] = {}  # by time and places of its inputs
        self._caches: dict[tuple[ExpertCapacity | None, ...], int] = {}
        self._passing: KnownUnits = {}
        self._last: tuple[Assignment, _SharedState] | None = None

    def seconds(self, phase: int, assignment: Assignment, below: float = inf) -> StepTime:
        """Return the time of one pass of phase number `phase` under an assignment; only a lower bound where that is
        `below` seconds or more."""
        shared = self._shared_state(assignment)
        if self.profile.phases[phase].name == STEP:
            assignment = assignment.in_steps()
        main = assignment.main
        times = self._times(phase, assignment, shared)
        visits = self._visits(phase, assignment, shared, times)
        compute: dict[Key, float] = {main: visits[-1].compute}
        links: dict[Key, float] = {}
        disk = 0.0
        accelerators = set(filter(is_accelerator, set(assignment.execution)))
        for execution, time, visit in zip(assignment.execution, times, visits, strict=False):
            compute[execution] = compute.get(execution, 0.0) + time.compute
            if execution in accelerators:
                links[execution] = links.get(execution, 0.0) + visit.fetch + visit.on_demand
            disk += time.disk
        seconds = seconds_of_pass(self._with_returns(visits, phase, assignment), assignment.slots, below)
        for unit in fetched_kv(self.profile, assignment.execution) if self.profile.kv_on_host else ():
            execution = assignment.execution[unit]
            links[execution] += self.units.kv_transfer(unit, execution, self.profile.phases[phase].name == STEP)
            seconds = max(seconds, links[execution])
        if self.profile.kv_in_ram:
            there = sum(kv_on_disk(self.profile, assignment.execution).values())
            disk += there / self.units.disk_rate(shared.on_disk + there)
            seconds = max(seconds, disk)
        if is_accelerator(main):
            return StepTime(seconds, compute, links, disk)
        cached = self.units.fits_page_cache(shared.on_disk)
        return StepTime(seconds if cached else max(seconds, disk), compute, links, 0.0 if cached else disk)

    def seconds_alone(self, phase: int, assignment: Assignment, below: float = inf) -> float:
        """Return the seconds of `seconds`, without the rest."""
        if self.profile.kv_on_host or self.profile.kv_in_ram or not is_accelerator(assignment.main):
            return self.seconds(phase, assignment, below).seconds
        shared = self._shared_state(assignment)
        if self.profile.phases[phase].name == STEP:
            assignment = assignment.in_steps()
        times = self._times(phase, assignment, shared)
        visits = self._visits(phase, assignment, shared, times)
        return seconds_of_pass(self._with_returns(visits, phase, assignment), assignment.slots, below)

    def seconds_after_pause(self, phase: int, assignment: Assignment) -> float:
        """Return the seconds of one pass of phase number `phase` if each begins so long after the one before that what
        was queued on links has arrived."""
        if self.profile.kv_on_host or self.profile.kv_in_ram or not is_accelerator(assignment.main):
            return self.seconds(phase, assignment).seconds
        shared = self._shared_state(assignment)
        if self.profile.phases[phase].name == STEP:
            assignment = assignment.in_steps()
        visits = self._visits(phase, assignment, shared, self._times(phase, assignment, shared))
        pause = sum(visit.fetch for visit in visits)
        visits = [*self._with_returns(visits, phase, assignment), Visit(pause, device=assignment.main)]
        return seconds_of_pass(visits, assignment.slots) - pause

    def _times(self, phase: int, assignment: Assignment, shared: _SharedState) -> list[_UnitTime]:
        """Return the time of each unit in a pass."""
        known, kinds = self._known_times(phase, shared), shared.kinds
        found = []
        for unit, (storage, execution) in enumerate(zip(assignment.storage, assignment.execution, strict=True)):
            option = unit, storage, execution, kinds.get(unit)
            time = known.get(option)
            if time is None:
                time = known[option] = self._new_unit_time(phase, unit, storage, execution, shared)
            found.append(time)
        return found

    def _visits(
        self, phase: int, assignment: Assignment, shared: _SharedState, times: Sequence[_UnitTime]
    ) -> list[Visit]:
        """Return the visits of a pass, with the transfers of inputs; the last is what runs between units."""
        execution, main = assignment.execution, assignment.main
        works, transfers = self.units.works[phase], self.units.input_transfers[phase]
        found = [time.visit for time in times]
        for unit in transfers.may_cross(execution, main):
            if works.get(unit):
                sources = transfers.sources(unit, execution, main)
                if sources:
                    key = id(times[unit]), sources  # the times of units are kept
                    visit = self._visits_with_inputs.get(key)
                    if visit is None:
                        visit = self._with_inputs(found[unit], phase, unit, assignment)
                        self._visits_with_inputs[key] = visit
                    found[unit] = visit
        between = self.units.compute(phase, OUTSIDE, main, shared.from_host)
        found.append(Visit(between, device=main))
        return found

    def _with_inputs(self, visit: Visit, phase: int, unit: int, assignment: Assignment) -> Visit:
        """Return a visit that begins with the transfer of the unit's inputs from other devices."""
        execution, main = assignment.execution[unit], assignment.main
        transfers = self.units.input_transfers[phase].from_elsewhere(unit, assignment.execution, main)
        crossings = [self.units.crossings(inputs, source, execution) for source, inputs in transfers]
        leaving, arriving = (sum(seconds) for seconds in zip(*crossings, strict=True))
        # What arrives shares the device's link with its streamed weights.
        return visit._replace(compute=visit.compute + leaving, inputs=arriving)

    def _with_returns(self, visits: list[Visit], phase: int, assignment: Assignment) -> list[Visit]:
        """Return the visits of units and, behind units on other devices, those in which outputs of theirs are moved to
        the main device."""
        execution, main = assignment.execution, assignment.main
        returned = self.units.input_transfers[phase].returned
        away = [unit for unit in returned if execution[unit] != main]
        if not away:
            return visits
        found = visits.copy()
        for unit in sorted(away, reverse=True):
            leaving, arriving = self.units.crossings(returned[unit], execution[unit], main)
            found.insert(unit + 1, Visit(leaving, inputs=arriving, device=main))
        return found

    def _shared_state(self, assignment: Assignment) -> _SharedState:
        """Return the properties of an assignment that all its phases and units share."""
        if self._last is None or self._last[0] is not assignment:
            units = self.profile.units
            caches = expert_capacities(self.profile, assignment, self._passing)
            by_unit = {
                index: tuple(caches.get((index, position)) for position in range(len(units[index].experts)))
                for index in {index for index, _ in caches}
            }
            found = _SharedState(
                on_disk=sum(
                    unit.weights for unit, storage in zip(units, assignment.storage, strict=True) if storage == DISK
                ),
                from_host=not is_accelerator(assignment.main),
                stream_buffers=assignment.stream_buffers,
                split=assignment.expert_split,
                caches=by_unit,
                kinds={index: self._caches.setdefault(own, len(self._caches)) for index, own in by_unit.items()},
            )
            self._last = assignment, found
        return self._last[1]

    def _known_times(self, phase: int, shared: _SharedState) -> dict[object, _UnitTime]:
        """Return the times of units in a phase that are known, by unit, its devices and its caches."""
        cached = self.units.fits_page_cache(shared.on_disk)
        key = phase, shared.from_host, shared.stream_buffers, shared.split, cached
        return self._unit_times.setdefault(key, {})

    def _new_unit_time(self, phase: int, unit: int, storage: Key, execution: Key, shared: _SharedState) -> _UnitTime:
        units, option, on_disk = self.units, (storage, execution), shared.on_disk
        caches, choices = shared.caches.get(unit, ()), units.choices[phase].get(unit, {})
        packed = storage == execution == HOST
        compute = taken = units.compute(phase, unit, execution, shared.from_host, packed)
        ahead = on_demand = asked = 0.0
        split = shared.split if storage == HOST and is_accelerator(execution) else None
        reuse = self.profile.expert_reuse if phase == len(self.profile.phases) - 1 else 0.0
        for position, choice in choices.items():
            cache = caches[position] if caches else None
            if cache is None:
                continue
            soon, then = cache.fetched(choice, reuse)
            if split is not None and choice.tokens < split.below and not soon:
                seconds, on_host = split.expected(choice.wanted, then)
                for _ in range(HITS_SETTLE if reuse else 0):
                    # What the host computes is not in the cache when routers choose it again.
                    _, then = cache.fetched(choice, reuse * (1 - on_host / choice.wanted))
                    seconds, on_host = split.expected(choice.wanted, then)
                asked += seconds
                taken -= on_host * units.expert_seconds(phase, unit, position, execution)
            else:
                ahead, on_demand = ahead + soon * cache.expert_bytes, on_demand + then * cache.expert_bytes
        fetch = units.fetch(phase, unit, option, on_disk, shared.stream_buffers, ahead)
        if fetch or ahead:
            taken += units.disturbance(unit, execution, ahead)
        if caches:
            taken += units.expert_overhead(phase, unit)
        disk = self.profile.units[unit].weights / units.disk_rate(on_disk) if storage == DISK else 0.0
        asked += units.fetch_on_demand(on_demand, option, on_disk)
        return _UnitTime(compute, Visit(taken, fetch, asked, device=execution, read=min(fetch, disk)), disk)


class Objective:
    """The weighted seconds of all phases, which a plan minimises.

    Args:
        cost: predicts seconds.
        name: "latency" (a step), "throughput" (the prompt and all steps); "fit" has the weights of "latency".
    """

    def __init__(self, cost: CostModel, name: str = "latency") -> None:
        self.cost = cost
        self.name = name
        self.weights = self._weights()

    def _weights(self) -> Mapping[int, float]:
        """Return the weight of each phase."""
        phases = self.cost.profile.phases
        if len(phases) == 1:
            return {0: 1.0}
        prompt = float(phases[0].repeats)
        if self.name == "throughput":
            asked = self.cost.profile.workload.new_tokens
            return {0: prompt, 1: float(UNKNOWN_NEW_TOKENS if asked is None else max(asked - 1, 1))}
        return {0: PROMPT_SHARE * prompt, 1: 1.0}

    def seconds(self, assignment: Assignment, below: float = inf) -> float:
        """Return the weighted seconds; infinity as soon as some phases alone take `below` or longer."""
        of_phases: dict[int, float] = {}
        for phase in self._longest_first:
            weight = self.weights[phase]
            # A little more than `below`, so that no rounding lets a lower bound pass for the seconds.
            of_phases[phase] = weight * self.cost.seconds_alone(phase, assignment, below / weight * (1 + 1e-9))
            if of_phases[phase] >= below:
                return inf
        return sum(of_phases[phase] for phase in self.weights if phase in of_phases)

    @cached_property
    def _longest_first(self) -> list[int]:
        return sorted(filter(self.weights.__getitem__, self.weights), key=self.weights.__getitem__, reverse=True)

    def steps(self, assignment: Assignment) -> list[StepTime]:
        """Return the time of one pass of each phase."""
        return [self.cost.seconds(phase, assignment) for phase in range(len(self.cost.profile.phases))]
