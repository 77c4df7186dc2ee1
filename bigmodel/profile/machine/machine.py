"""The profile of a machine: how fast each device computes and how fast bytes reach it, in seconds and bytes; its JSON
form; and a nominal machine for plans without a measurement.

A machine nobody measured: round figures of a server with a data-centre accelerator.

Good for finding how parts should be arranged on a machine that is not here, for that depends on ratios that differ
little between such machines. Not good for telling seconds, and nothing does so with it.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from ...errors import PlanError
from ...limits import NEARLY_ALL_EXPERTS
from ..model.experts import RouterChoice
from ..trace.work import ATTENTION, CALL, MOVE, PRODUCT, ROUTE, Work

CACHED = ":cached"
"""Ends the name of a curve that was measured with what it reads in the processor's cache."""


@dataclass(frozen=True)
class Curve:
    """A measured function of one size, given at a few sizes; between them it is interpolated on logarithmic scales.

    Attributes:
        sizes: ascending, positive.
        values: positive, one for each size.
        grows: beyond the largest size the value is proportional to the size; else it stays.
    """

    sizes: tuple[float, ...]
    values: tuple[float, ...]
    grows: bool = False

    def at(self, size: float) -> float:
        """Return the value at `size`."""
        if size <= self.sizes[0]:
            return self.values[0]
        if size >= self.sizes[-1]:
            return self.values[-1] * (size / self.sizes[-1] if self.grows else 1.0)
        right = bisect.bisect_right(self.sizes, size)
        low, high = self.sizes[right - 1], self.sizes[right]
        share = math.log(size / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(self.values[right - 1]) + share * math.log(self.values[right]))


@dataclass(frozen=True)
class DeviceSpeed:
    """How fast one device computes.

    Attributes:
        curves: "product:float32": rows to seconds for each number of the matrix, the matrix read from memory; with
            ":cached" at the end, read from the processor's cache. "attention:float32" alike. "move": bytes to
            seconds for each byte. "route": seconds that sorting a few tokens by experts takes beyond its operations.
        call: seconds that one operation takes beside its work: Python, dispatch, launch.
        call_cached: the same where no large weights drive code and data out of the processor's cache.
        asynchronous: operations are queued, so calls go on beside the work of those before them.
    """

    curves: Mapping[str, Curve]
    call: float
    call_cached: float
    asynchronous: bool = False

    def seconds(self, work: Work, cached: bool = False) -> float:
        """Return how long an operation takes beside its call.

        Args:
            work: the operation.
            cached: what it reads is in the processor's cache: the model is small.
        """
        if work.kind == CALL or (work.kind == ROUTE and ROUTE not in self.curves):
            return 0.0
        if work.kind == ROUTE:
            return self.curves[ROUTE].at(1)
        if work.kind == MOVE:
            return work.nbytes * self.curves[MOVE].at(max(work.nbytes, 1))
        return work.elements * self._curve(work.kind, work.dtype, cached).at(max(work.rows, 1))

    def total(self, works: Sequence[Work], cached: bool = False) -> float:
        """Return the seconds of operations that run one after another."""
        calls = (self.call_cached if cached else self.call) * len(works)
        working = sum(self.seconds(work, cached) for work in works)
        return max(calls, working) if self.asynchronous else calls + working

    def _curve(self, kind: str, dtype: str, cached: bool) -> Curve:
        names = [f"{kind}:{dtype}", f"{kind}:float32", f"{PRODUCT}:{dtype}", f"{PRODUCT}:float32"]
        for name in names:
            if cached and name + CACHED in self.curves:
                return self.curves[name + CACHED]
            if name in self.curves:
                return self.curves[name]
        raise KeyError(kind)


@dataclass(frozen=True)
class LinkSpeed:
    """How fast bytes move one way between the host and a device: a copy of n bytes takes `latency` + n / `rate`."""

    rate: float
    latency: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Return how long `nbytes` are on their way."""
        return self.latency + nbytes / self.rate


@dataclass(frozen=True)
class DeviceLinks:
    """The links of one accelerator to the host; pinned ones are those that copies of weights use where there are any.

    Attributes:
        to_device: from pinned memory.
        to_device_pageable: from ordinary memory.
        to_host: to pinned memory.
        to_host_pageable: to ordinary memory.
        disturbance: seconds that compute on the device loses for each byte copied to it meanwhile; 0 where copies have
            engines of their own.
    """

    to_device: LinkSpeed
    to_device_pageable: LinkSpeed
    to_host: LinkSpeed
    to_host_pageable: LinkSpeed
    disturbance: float = 0.0


@dataclass(frozen=True)
class ExpertOverhead:
    """Seconds that the host spends between a router and experts that are fetched one by one, beside their transfers.

    Attributes:
        module: for each call of a module of experts.
        chosen: for each expert that is chosen.
        ahead: for each expert of the next module, where nearly all are chosen, so that the next module's are fetched.
    """

    module: float = 0.0
    chosen: float = 0.0
    ahead: float = 0.0

    def seconds(self, choice: RouterChoice) -> float:
        """Return the seconds of one call of a module of experts."""
        prefetched = choice.count if choice.wanted >= NEARLY_ALL_EXPERTS * choice.count else 0
        return self.module + self.chosen * choice.wanted + self.ahead * prefetched


@dataclass(frozen=True)
class MachineProfile:
    """What was measured of one machine.

    Attributes:
        name: what it is, in words.
        key: differs when anything differs that the figures depend on.
        devices: by canonical name, "cpu" among them.
        links: by canonical name of the accelerator; by "cpu" copies from one place of the host's memory to another.
        memory_rate: bytes per second that the host reads from its memory.
        disk_cold: bytes per second from the disk itself.
        disk_warm: bytes per second from the kernel's cache of files into memory.
        expert_overhead: seconds of Python for experts that are fetched one by one.
        cache_bytes: bytes of the processor's last cache.
        memory_bytes: bytes of the host's memory.
        measured_at: seconds since the epoch.
    """

    name: str
    key: str
    devices: Mapping[str, DeviceSpeed]
    links: Mapping[str, DeviceLinks]
    memory_rate: float
    disk_cold: float
    disk_warm: float
    expert_overhead: ExpertOverhead = ExpertOverhead()
    cache_bytes: int = 0
    memory_bytes: int = 0
    measured_at: float = 0.0

    def device(self, name: str) -> DeviceSpeed:
        """Return the speed of a device by canonical name; of one like it, if that very one was not measured."""
        if name in self.devices:
            return self.devices[name]
        kind = name.partition(":")[0]
        alike = [speed for other, speed in self.devices.items() if other.partition(":")[0] == kind]
        return alike[0] if alike else self.devices["cpu"]

    def link(self, name: str) -> DeviceLinks:
        """Return the links of an accelerator by canonical name; of one like it, if that very one was not measured."""
        if name in self.links:
            return self.links[name]
        kind = name.partition(":")[0]
        alike = [link for other, link in self.links.items() if other.partition(":")[0] == kind]
        if alike:
            return alike[0]
        memory = LinkSpeed(self.memory_rate)
        return DeviceLinks(memory, memory, memory, memory)


FORMAT = 3
"""Raised whenever what is measured changes: a profile of another format is measured again."""


def dump(machine: MachineProfile) -> str:
    """Return `machine` as JSON text."""
    return json.dumps({"format": FORMAT, "machine": asdict(machine)}, indent=1) + "\n"


def load(text: str) -> MachineProfile:
    """Return the machine profile in JSON text.

    Raises:
        PlanError: the text is not a machine profile of this format.
    """
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise PlanError(f"this machine profile has format {content['format']}; this version reads {FORMAT}")
        return TypeAdapter(MachineProfile).validate_python(content["machine"])
    except (ValidationError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise PlanError(f"this is not a machine profile: {error}") from None


def nominal_machine() -> MachineProfile:
    """Return a machine of round figures, like a server with a data-centre accelerator that stands for any CUDA device.

    Plans for a machine that is not here are searched with it, as the best placement depends on ratios that differ
    little between such machines. It predicts no seconds.
    """
    link = LinkSpeed(25e9, 10e-6)
    return MachineProfile(
        name="round figures, not measured",
        key="nominal",
        devices={"cpu": _device(2e-10, 2e11, 5e-6), "cuda:0": _device(1e-12, 4e14, 5e-6)},
        links={"cuda:0": DeviceLinks(link, LinkSpeed(12e9, 10e-6), link, LinkSpeed(12e9, 10e-6))},
        memory_rate=1e11,
        disk_cold=5e9,
        disk_warm=2e10,
        expert_overhead=ExpertOverhead(module=6.2e-4, chosen=4.6e-5, ahead=5.6e-5),
        cache_bytes=2**25,
        memory_bytes=2**39,
    )


def _device(read: float, operations: float, call: float) -> DeviceSpeed:
    """Return a device that reads a number in `read` seconds and does `operations` per second, two per product."""
    per_row = 2 / operations
    rows = (1.0, 256.0)
    curve = Curve(rows, (max(read, per_row), max(read, per_row * rows[-1])), grows=True)
    return DeviceSpeed(
        {f"{PRODUCT}:float32": curve, f"{ATTENTION}:float32": curve, MOVE: Curve((1.0,), (read,))}, call, call
    )
