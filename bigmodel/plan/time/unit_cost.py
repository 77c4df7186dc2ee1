"""Predicted seconds of one unit: computing, being fetched, having its inputs brought, asking for its experts.

How much there is to do in asking for experts: the chosen ones are found, held, and let go of.

It is counted in calls that `dispatch` makes in Python between a router and its experts, all of them being there. What a
call takes, the machine says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ...devices import DISK, HOST, accelerators, normalize_device
from ...profile import Profile
from ...profile.machine.machine import MachineProfile
from ...profile.model.experts import Choice
from ...profile.model.quantized import offloaded_bytes
from ...profile.trace.work import Work
from ..memory.slots import NEARLY_ALL
from ..result.budgets import Key, is_accelerator
from .input_transfers import Crossings, Inputs

WARM_SHARE = 0.7
"""Share of the host's memory that files may take for the kernel to keep them."""

Option = tuple[Key, Key]
"""Where a unit is held, and where it runs."""


class UnitCost:
    """Seconds of a profile's units on one machine.

    Args:
        profile: what the model needs.
        machine: what the machine gives.
    """

    def __init__(self, profile: Profile, machine: MachineProfile) -> None:
        self.profile = profile
        self.machine = machine
        self.works = [phase.trace.work() for phase in profile.phases]
        self.choices = [phase.trace.choices() for phase in profile.phases]
        self._works_from_host = [
            None if phase.from_host is None else phase.from_host.work() for phase in profile.phases
        ]
        self.crossings = [Crossings(phase.trace) for phase in profile.phases]
        self._known: dict[tuple[int, int, Key, bool], float] = {}
        self._names: dict[Key, str] = {}

    @cached_property
    def cached_share(self) -> float:
        """Share of the weights that stays in the processor's cache from one pass to the next."""
        cache = max(self.machine.cache_bytes, 1)
        return min(1.0, max(0.0, 2.0 - self.profile.weights / (0.75 * cache)))

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
            works = self.works[phase] if other is None else other
            self._known[key] = self.of_works(works.get(unit, ()), runs)
        return self._known[key]

    def least_compute(self, phase: int, unit: int, runs: Key) -> float:
        """Return the seconds that `unit` computes on a device at least, wherever other units lie."""
        return min(self.compute(phase, unit, runs, from_host) for from_host in (False, True))

    def of_works(self, works: Sequence[Work], runs: Key) -> float:
        """Return the seconds of operations that run one after another on a device."""
        speed, share = self.machine.device(self.name(runs)), self.cached_share
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
        if is_accelerator(held) or not is_accelerator(runs):
            return 0.0
        profile = self.profile.units[unit]
        if experts is None:
            experts = sum(
                choice.wanted * profile.experts[position].nbytes
                for position, choice in self.choices[phase].get(unit, {}).items()
            )
        weights = offloaded_bytes(profile, self.profile.offload_dtype) - profile.expert_weights + experts
        nbytes = weights + (profile.buffers if with_buffers else 0)
        if not nbytes:
            return 0.0
        seconds = self.machine.link(self.name(runs)).to_device.seconds(int(nbytes))
        return max(seconds, nbytes / self.disk_rate(on_disk)) if held == DISK else seconds

    def asked(self, nbytes: float, option: Option, on_disk: int) -> float:
        """Return the seconds that a unit waits for `nbytes` of experts that it asks for."""
        held, runs = option
        if not nbytes:
            return 0.0
        copied = self.machine.link(self.name(runs)).to_device.seconds(int(nbytes))
        from_disk = nbytes / self.disk_rate(on_disk) if held == DISK else 0.0
        return max(copied, from_disk) if is_accelerator(runs) else copied + from_disk

    def asking(self, phase: int, unit: int) -> float:
        """Return the seconds in which the host finds which experts of a unit are chosen and where they are."""
        calls = sum(calls_of_asking(choice) for choice in self.choices[phase].get(unit, {}).values())
        return calls * self.machine.python_call

    def leaving(self, inputs: Inputs, lies: Key) -> float:
        """Return the seconds that something takes from the device it is on to the host."""
        if not is_accelerator(lies):
            return 0.0
        link = self.machine.link(self.name(lies)).to_host
        return link.seconds(inputs.nbytes) + (inputs.tensors - 1) * link.latency

    def arriving(self, inputs: Inputs, runs: Key) -> float:
        """Return the seconds that something takes from the host to a device, once the link is free."""
        if not is_accelerator(runs):
            return 0.0
        link = self.machine.link(self.name(runs)).to_device_pageable
        return link.seconds(inputs.nbytes) + (inputs.tensors - 1) * link.latency

    def disk_rate(self, on_disk: int) -> float:
        """Return the bytes per second that weights are read at, `on_disk` of them lying there."""
        return self.machine.disk_warm if self.is_kept(on_disk) else self.machine.disk_cold

    def is_kept(self, on_disk: int) -> bool:
        """Whether the kernel keeps so many bytes of files in memory."""
        return on_disk <= WARM_SHARE * self.machine.memory_bytes

    def name(self, key: Key) -> str:
        """Return the canonical name of a device key."""
        if key not in self._names:
            self._names[key] = device_name(key)
        return self._names[key]


def device_name(key: Key) -> str:
    """Return the canonical name of a device key; of an accelerator that this machine does not have, its likeliest."""
    if key in (HOST, DISK):
        return HOST
    if isinstance(key, int) and not accelerators():
        return f"cuda:{key}"
    return normalize_device(key)


OF_MODULE, OF_EXPERT = 310, 23
"""Calls for a module, and for each expert that is chosen."""

OF_NEXT = 28
"""Calls for each expert of the module that follows, where nearly all are wanted and it is seen to ahead."""


def calls_of_asking(choice: Choice) -> float:
    """Return how many calls in Python one module's experts are asked for with."""
    ahead = OF_NEXT * choice.count if choice.wanted >= NEARLY_ALL * choice.count else 0
    return OF_MODULE + OF_EXPERT * choice.wanted + ahead
