"""Predicted seconds of a placement: the one place that says what it costs in time. Plan, search and tests ask it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..devices import DISK, HOST, accelerators, normalize_device
from ..profile import Phase, Profile
from ..profile.machine import MachineProfile
from ..profile.quantized import offloaded_bytes
from ..profile.share import for_share_of_tokens
from ..profile.trace import OUTSIDE, Enter
from ..profile.work import Work
from .assignment import STEP, Assignment
from .budgets import Key, is_accelerator
from .schedule import Visit, seconds_of_pass
from .slots import ExpertRoom, expert_rooms

WARM_SHARE = 0.7
"""Share of the host's memory that files may take for the kernel to keep them."""

ASKING_CALLS = 350
"""What Python does to find a module's experts, hold them and let go of them, in calls of an operation on the host."""

Option = tuple[Key, Key]
"""Where a unit is held, and where it runs."""


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


class CostModel:
    """Seconds of a profile's phases on one machine.

    Args:
        profile: what the model needs.
        machine: what the machine gives.
    """

    def __init__(self, profile: Profile, machine: MachineProfile) -> None:
        self.profile = profile
        self.machine = machine
        self._works = [phase.trace.work() for phase in profile.phases]
        self._works_from_host = [
            None if phase.from_host is None else phase.from_host.work() for phase in profile.phases
        ]
        self._choices = [phase.trace.choices() for phase in profile.phases]
        self._inputs = [_input_bytes(phase) for phase in profile.phases]
        self._known: dict[tuple[int, int, Key, bool], float] = {}
        self._names: dict[Key, str] = {}
        self._rooms: tuple[Assignment | None, Mapping[tuple[int, int], ExpertRoom]] = None, {}

    @cached_property
    def cached_share(self) -> float:
        """Share of the weights that stays in the processor's cache from one pass to the next."""
        cache = max(self.machine.cache_bytes, 1)
        return min(1.0, max(0.0, 2.0 - self.profile.weights / (0.75 * cache)))

    def seconds(self, phase: int, assignment: Assignment) -> StepTime:
        """Return the time of one pass of phase number `phase` under an assignment."""
        if self.profile.phases[phase].name == STEP:
            assignment = assignment.in_steps()
        main, on_disk = assignment.main, self._bytes_on_disk(assignment)
        from_host = bool(assignment.held) and not is_accelerator(assignment.held[self.profile.first])
        rooms = self._rooms_of(assignment)
        visits: list[Visit] = []
        compute: dict[Key, float] = {main: self.compute(phase, OUTSIDE, main, from_host)}
        link = disk = 0.0
        last = main
        for unit, (held, runs) in enumerate(zip(assignment.held, assignment.runs, strict=True)):
            taken = self.compute(phase, unit, runs, from_host)
            compute[runs] = compute.get(runs, 0.0) + taken
            if runs != last and self._works[phase].get(unit):
                taken += self.crossing(phase, unit, last, runs)
                last = runs
            ahead, asked = self._experts(phase, unit, rooms)
            fetch = self.fetch(phase, unit, (held, runs), on_disk, assignment.stream_buffers, ahead)
            wait = self._asked(asked, (held, runs), on_disk)
            if is_accelerator(runs):
                link += fetch + wait
            if held == DISK:
                disk += self._weights(unit) / self._disk_rate(on_disk) if on_disk > 0 else 0.0
            if fetch or ahead:
                whole = self._weights(unit) - self.profile.units[unit].expert_weights if is_accelerator(runs) else 0
                taken += (whole + ahead) * self.machine.link(self._name(runs)).disturbance
            if (unit, 0) in rooms and self._choices[phase].get(unit):
                taken += ASKING_CALLS * self.machine.device(HOST).call_cached
            visits.append(Visit(taken, fetch, wait))
        visits.append(Visit(self.compute(phase, OUTSIDE, main, from_host)))
        seconds = seconds_of_pass(visits, assignment.slots)
        if not is_accelerator(main) and on_disk > self._file_room():
            seconds = max(seconds, disk)
        elif not is_accelerator(main):
            disk = 0.0
        return StepTime(seconds, compute, link, disk)

    def compute(self, phase: int, unit: int, runs: Key, from_host: bool = False) -> float:
        """Return the seconds that `unit` computes on a device, its weights being there.

        Args:
            phase: number of the phase.
            unit: position of the unit; `OUTSIDE`: what is between units.
            runs: the device.
            from_host: the model's first weights lie on the host: see `Phase.from_host`.
        """
        other = self._works_from_host[phase] if from_host else None
        key = (phase, unit, runs, other is not None)
        if key not in self._known:
            works = self._works[phase] if other is None else other
            self._known[key] = self._total(works.get(unit, ()), runs)
        return self._known[key]

    def least_compute(self, phase: int, unit: int, runs: Key) -> float:
        """Return the seconds that `unit` computes on a device at least, wherever other units lie."""
        return min(self.compute(phase, unit, runs, from_host) for from_host in (False, True))

    def _total(self, works: Sequence[Work], runs: Key) -> float:
        speed, share = self.machine.device(self._name(runs)), self.cached_share
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
        """Return the seconds that the link brings a streamed unit's weights; 0 for one that is not streamed.

        Args:
            phase: number of the phase.
            unit: position of the unit.
            option: where it is held and where it runs.
            on_disk: bytes of all weights on disk.
            with_buffers: its buffers come with it.
            experts: bytes of its experts that come with it; None: all that are wanted.
        """
        held, runs = option
        profile = self.profile.units[unit]
        if experts is None:
            experts = sum(
                choice.wanted * profile.experts[position].nbytes
                for position, choice in self._choices[phase].get(unit, {}).items()
            )
        weights = offloaded_bytes(profile, self.profile.offload_dtype) - profile.expert_weights + experts
        nbytes = weights + (profile.buffers if with_buffers else 0)
        if is_accelerator(held) or not is_accelerator(runs) or not nbytes:
            return 0.0
        seconds = self.machine.link(self._name(runs)).to_device.seconds(int(nbytes))
        return max(seconds, nbytes / self._disk_rate(on_disk)) if held == DISK else seconds

    def _rooms_of(self, assignment: Assignment) -> Mapping[tuple[int, int], ExpertRoom]:
        """Return the rooms of experts, found once for all phases of an assignment."""
        if self._rooms[0] is not assignment:
            self._rooms = assignment, expert_rooms(self.profile, assignment)
        return self._rooms[1]

    def _experts(self, phase: int, unit: int, rooms: Mapping[tuple[int, int], ExpertRoom]) -> tuple[float, float]:
        """Return the bytes of a unit's experts that are brought in one pass: ahead of it, and when they are chosen."""
        ahead = asked = 0.0
        for position, choice in self._choices[phase].get(unit, {}).items():
            room = rooms.get((unit, position))
            if room is not None:
                soon, then = room.brought(choice)
                ahead, asked = ahead + soon * room.expert_bytes, asked + then * room.expert_bytes
        return ahead, asked

    def _asked(self, nbytes: float, option: Option, on_disk: int) -> float:
        """Return the seconds that a unit waits for experts that it asks for."""
        held, runs = option
        if not nbytes:
            return 0.0
        copied = self.machine.link(self._name(runs)).to_device.seconds(int(nbytes))
        from_disk = nbytes / self._disk_rate(on_disk) if held == DISK else 0.0
        return max(copied, from_disk) if is_accelerator(runs) else copied + from_disk

    def streamed_from(self, unit: int, main: Key) -> int | None:
        """Return of how many tokens a call is that takes a unit in host memory less time streamed to `main` than
        computed on the host; None if prompt and step do not differ in that.

        Between the two, operations are taken to ask in proportion to tokens. What a fetch hides behind is not known
        here: it counts whole.
        """
        tokens = [phase.tokens * self.profile.workload.batch_size for phase in self.profile.phases]
        if len(tokens) != 2 or not self._works[1].get(unit):
            return None
        many, few = tokens

        def computing_wins(number: int) -> bool:
            works, share = (self._works[1][unit], 1.0) if number == tokens[1] else (prompt, number / tokens[0])
            some = [for_share_of_tokens(work, share) for work in works]
            return self._total(some, HOST) < max(fetch, self._total(some, main))

        prompt, fetch = self._works[0].get(unit, ()), self.fetch(0, unit, (HOST, main), 0)
        if many <= few or computing_wins(many) or not computing_wins(few):
            return None
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if computing_wins(middle) else (few, middle)
        return many

    def crossing(self, phase: int, unit: int, before: Key, after: Key) -> float:
        """Return the seconds that a unit's inputs take from one device to another."""
        nbytes = self._inputs[phase].get(unit, 0)
        seconds = 0.0
        if is_accelerator(before):
            seconds += self.machine.link(self._name(before)).to_host.seconds(nbytes)
        if is_accelerator(after):
            seconds += self.machine.link(self._name(after)).to_device_pageable.seconds(nbytes)
        return seconds

    def _name(self, key: Key) -> str:
        if key not in self._names:
            self._names[key] = device_name(key)
        return self._names[key]

    def _weights(self, unit: int) -> int:
        return self.profile.units[unit].weights

    def _bytes_on_disk(self, assignment: Assignment) -> int:
        return sum(self._weights(unit) for unit, held in enumerate(assignment.held) if held == DISK)

    def _file_room(self) -> float:
        return WARM_SHARE * self.machine.memory_bytes

    def _disk_rate(self, on_disk: int) -> float:
        return self.machine.disk_warm if on_disk <= self._file_room() else self.machine.disk_cold


def device_name(key: Key) -> str:
    """Return the canonical name of a device key; of an accelerator that this machine does not have, its likeliest."""
    if key in (HOST, DISK):
        return HOST
    if isinstance(key, int) and not accelerators():
        return f"cuda:{key}"
    return normalize_device(key)


def _input_bytes(phase: Phase) -> dict[int, int]:
    """Return the bytes that each unit is called with."""
    found: dict[int, int] = {}
    for event in phase.trace.events:
        if isinstance(event, Enter):
            found.setdefault(event.unit, sum(nbytes for _, nbytes in event.inputs))
    return found
