"""Predicted seconds of a placement: the one place that says what it costs in time. Plan, search and tests ask it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...devices import DISK
from ...profile import Profile
from ...profile.machine.machine import MachineProfile
from ...profile.trace.trace import OUTSIDE
from ..memory.assignment import STEP, Assignment
from ..memory.slots import ExpertRoom, expert_rooms
from ..result.budgets import Key, is_accelerator
from .schedule import Visit, seconds_of_pass
from .unit_cost import UnitCost


@dataclass(frozen=True)
class StepTime:
    """Where the time of one pass goes.

    Attributes:
        seconds: all of it.
        compute: seconds of computing by device key.
        link: seconds that the main device's link is busy with weights.
        disk: seconds that weights are read from disk.
    """

    seconds: float
    compute: Mapping[Key, float] = field(default_factory=dict)
    link: float = 0.0
    disk: float = 0.0

    @property
    def binds(self) -> str:
        """What the time is spent on first of all."""
        parts = {f"computing on {key}": seconds for key, seconds in self.compute.items()}
        parts["the link to the main device"] = self.link
        parts["reading from disk"] = self.disk
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class _Circumstances:
    """What of an assignment the time of each unit depends on, beside where the unit itself is."""

    on_disk: int
    from_host: bool
    stream_buffers: bool
    rooms: Mapping[int, tuple[ExpertRoom | None, ...]]


@dataclass(frozen=True)
class _Turn:
    """One unit's part of a pass, its inputs being there."""

    compute: float
    visit: Visit
    disk: float


class CostModel:
    """Seconds of a profile's phases on one machine.

    Args:
        profile: what the model needs.
        machine: what the machine gives.

    Attributes:
        units: what single units take.
    """

    def __init__(self, profile: Profile, machine: MachineProfile) -> None:
        self.profile = profile
        self.units = UnitCost(profile, machine)
        self._turns: dict[object, _Turn] = {}
        self._brought: dict[object, tuple[float, float]] = {}
        self._last: tuple[Assignment, _Circumstances] | None = None

    def seconds(self, phase: int, assignment: Assignment) -> StepTime:
        """Return the time of one pass of phase number `phase` under an assignment."""
        around = self._circumstances(assignment)
        if self.profile.phases[phase].name == STEP:
            assignment = assignment.in_steps()
        main = assignment.main
        between = self.units.compute(phase, OUTSIDE, main, around.from_host)
        compute: dict[Key, float] = {main: between}
        link = disk = 0.0
        visits: list[Visit] = []
        for unit, (held, runs) in enumerate(zip(assignment.held, assignment.runs, strict=True)):
            turn = self._turn(phase, unit, held, runs, around)
            visit = turn.visit
            compute[runs] = compute.get(runs, 0.0) + turn.compute
            if self.units.works[phase].get(unit):
                visit = self._with_inputs(visit, phase, unit, assignment)
            if is_accelerator(runs):
                link += visit.fetch + visit.asked
            disk += turn.disk
            visits.append(visit)
        visits.append(Visit(between))
        seconds = seconds_of_pass(visits, assignment.slots)
        if is_accelerator(main):
            return StepTime(seconds, compute, link, disk)
        kept = self.units.is_kept(around.on_disk)
        return StepTime(seconds if kept else max(seconds, disk), compute, link, 0.0 if kept else disk)

    def _with_inputs(self, visit: Visit, phase: int, unit: int, assignment: Assignment) -> Visit:
        """Return a unit's turn that begins with bringing what it is called with from other devices."""
        runs, main = assignment.runs[unit], assignment.main
        brought = tuple(self.units.crossings[phase].from_elsewhere(unit, assignment.runs, main))
        if not brought:
            return visit
        key = runs, main, brought
        if key not in self._brought:
            leaving = sum(self.units.leaving(inputs, lies) for lies, inputs in brought)
            arriving = sum(self.units.arriving(inputs, runs) for _, inputs in brought)
            # To the main device they come over the link that brings weights, too.
            self._brought[key] = (leaving, arriving) if runs == main else (leaving + arriving, 0.0)
        before, behind = self._brought[key]
        return Visit(visit.compute + before, visit.fetch, visit.asked, behind)

    def _circumstances(self, assignment: Assignment) -> _Circumstances:
        """Return what is found once for all phases and units of an assignment."""
        if self._last is None or self._last[0] is not assignment:
            units = self.profile.units
            rooms = expert_rooms(self.profile, assignment)
            found = _Circumstances(
                on_disk=sum(unit.weights for unit, held in zip(units, assignment.held, strict=True) if held == DISK),
                from_host=bool(assignment.held) and not is_accelerator(assignment.held[self.profile.first]),
                stream_buffers=assignment.stream_buffers,
                rooms={
                    index: tuple(rooms.get((index, position)) for position in range(len(units[index].experts)))
                    for index in {index for index, _ in rooms}
                },
            )
            self._last = assignment, found
        return self._last[1]

    def _turn(self, phase: int, unit: int, held: Key, runs: Key, around: _Circumstances) -> _Turn:
        rooms = around.rooms.get(unit, ())
        kept = self.units.is_kept(around.on_disk)
        key = phase, unit, held, runs, around.from_host, around.stream_buffers, kept, rooms
        if key not in self._turns:
            self._turns[key] = self._new_turn(phase, unit, held, runs, around)
        return self._turns[key]

    def _new_turn(self, phase: int, unit: int, held: Key, runs: Key, around: _Circumstances) -> _Turn:
        units, profile, option, on_disk = self.units, self.profile.units[unit], (held, runs), around.on_disk
        rooms, choices = around.rooms.get(unit, ()), units.choices[phase].get(unit, {})
        compute = taken = units.compute(phase, unit, runs, around.from_host)
        ahead = asked = 0.0
        for position, choice in choices.items():
            room = rooms[position] if rooms else None
            if room is not None:
                soon, then = room.brought(choice)
                ahead, asked = ahead + soon * room.expert_bytes, asked + then * room.expert_bytes
        fetch = units.fetch(phase, unit, option, on_disk, around.stream_buffers, ahead)
        if fetch or ahead:
            whole = profile.weights - profile.expert_weights if is_accelerator(runs) else 0
            taken += (whole + ahead) * units.machine.link(units.name(runs)).disturbance
        if rooms:
            taken += units.asking(phase, unit)
        disk = profile.weights / units.disk_rate(on_disk) if held == DISK else 0.0
        return _Turn(compute, Visit(taken, fetch, units.asked(asked, option, on_disk)), disk)
