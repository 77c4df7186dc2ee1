"""The profile of a machine: the speed of its devices, links, memory and disk; its JSON; and a nominal machine."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from pydantic import TypeAdapter

from ...devices.memory import CachingMemory
from ...errors import PlanError
from ...limits import NEARLY_ALL_EXPERTS
from ..model.experts import RouterChoice
from ..trace.work import ATTENTION, CALL, MOVE, PRODUCT, ROUTE, Work

CACHED = ":cached"
"""Suffix of the names of curves that were measured with inputs in the processor's cache."""


@dataclass(frozen=True)
class Curve:
    """A measured function of a size, sampled at a few sizes and interpolated between them on logarithmic scales.

    Attributes:
        sizes: ascending, positive.
        values: positive, one for each size.
        grows: beyond the largest size the value is proportional to the size; otherwise it is constant.
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
    """The compute speed of a device.

    Attributes:
        curves: "product:float32": rows -> seconds per element of the matrix, read from memory, or with the suffix
            ":cached" from the processor's cache; likewise "attention:float32". On the host also "product:int4" and
            "product:int8", of packed weights. "move": bytes -> seconds per byte. "route": seconds that sorting a few
            tokens by expert takes beyond its operations.
        call: overhead of one operation in seconds: Python, dispatch, launch.
        call_cached: the same for models whose weights do not evict code and data from the processor's cache.
        asynchronous: operations are queued, so the overhead of a call overlaps with the work of earlier ones.
    """

    curves: Mapping[str, Curve]
    call: float
    call_cached: float
    asynchronous: bool = False

    def seconds(self, work: Work, cached: bool = False) -> float:
        """Return the seconds of an operation without its call overhead.

        Args:
            work: the operation.
            cached: its inputs are in the processor's cache, as the model is small.
        """
        if work.kind == CALL or (work.kind == ROUTE and ROUTE not in self.curves):
            return 0.0
        if work.kind == ROUTE:
            return self.curves[ROUTE].at(1)
        if work.kind == MOVE:
            return work.nbytes * self.curves[MOVE].at(max(work.nbytes, 1))
        return work.elements * self._curve(work.kind, work.dtype, cached).at(max(work.rows, 1))

    def total(self, works: Sequence[Work], cached: bool = False) -> float:
        """Return the seconds of a sequence of operations."""
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
    """The speed of one direction of a link: a copy of n bytes takes `latency` + n / `rate` seconds.

    Raises:
        PlanError: the rate is not above 0.
    """

    rate: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:  # nor is NaN
            raise PlanError(f"a link has {self.rate} bytes per second; give more than 0")

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of a copy of `nbytes`."""
        return self.latency + nbytes / self.rate


@dataclass(frozen=True)
class DeviceLinks:
    """The links between an accelerator and the host. Copies of weights use pinned memory if there is any.

    Attributes:
        to_device: from pinned memory.
        to_device_pageable: from pageable memory.
        to_host: to pinned memory.
        to_host_pageable: to pageable memory.
        disturbance: seconds that compute on the device loses for each byte that is copied to it meanwhile; 0 for
            devices with copy engines.
        to_peer: to another accelerator of the same kind; None: not measured.
    """

    to_device: LinkSpeed
    to_device_pageable: LinkSpeed
    to_host: LinkSpeed
    to_host_pageable: LinkSpeed
    disturbance: float = 0.0
    to_peer: LinkSpeed | None = None


@dataclass(frozen=True)
class ExpertOverhead:
    """Seconds that the host spends between a router and experts that are fetched one by one, without transfers.

    Attributes:
        module: for each call of a module of experts.
        chosen: for each expert that is chosen.
        ahead: for each expert of the next module, if these are prefetched because nearly all experts are chosen.
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
    """The measurements of one machine.

    Attributes:
        name: description of the machine.
        key: hash of everything that the figures depend on.
        devices: by canonical name, "cpu" among them.
        links: by canonical name of the accelerator; "cpu" stands for copies within the host's memory.
        caching: bytes that accelerators with caching allocators take beside tensors, by canonical name.
        memory_rate: bytes per second at which the host reads its memory.
        disk_cold: bytes per second at which the disk is read.
        disk_warm: bytes per second at which files in the page cache are read.
        expert_overhead: seconds of Python for experts that are fetched one by one.
        readers: number of threads that read the disk at full speed, no more than needed; 0: not measured.
        cache_bytes: bytes of the processor's last-level cache.
        memory_bytes: bytes of the host's memory.
        measured_at: seconds since the epoch.
        others: share of the cores that other programs used while it was measured, 0 to 1.
    """

    name: str
    key: str
    devices: Mapping[str, DeviceSpeed]
    links: Mapping[str, DeviceLinks]
    memory_rate: float
    disk_cold: float
    disk_warm: float
    expert_overhead: ExpertOverhead = ExpertOverhead()
    caching: Mapping[str, CachingMemory] = field(default_factory=dict)
    readers: int = 0
    cache_bytes: int = 0
    memory_bytes: int = 0
    measured_at: float = 0.0
    others: float = 0.0

    def device(self, name: str) -> DeviceSpeed:
        """Return the speed of a device by canonical name, or of one of the same type if it was not measured."""
        if name in self.devices:
            return self.devices[name]
        kind = name.partition(":")[0]
        alike = [speed for other, speed in self.devices.items() if other.partition(":")[0] == kind]
        return alike[0] if alike else self.devices["cpu"]

    def caching_memory(self, name: str) -> CachingMemory | None:
        """Return what a device takes beside tensors, by canonical name, or one of the same type if it was not measured;
        None if its allocator does not cache."""
        kind = name.partition(":")[0]
        alike = (memory for other, memory in self.caching.items() if other.partition(":")[0] == kind)
        return self.caching.get(name) or next(alike, None)

    def link(self, name: str) -> DeviceLinks:
        """Return the links of an accelerator by canonical name, or of one of the same type if it was not measured."""
        if name in self.links:
            return self.links[name]
        kind = name.partition(":")[0]
        alike = [link for other, link in self.links.items() if other.partition(":")[0] == kind]
        if alike:
            return alike[0]
        memory = LinkSpeed(self.memory_rate)
        return DeviceLinks(memory, memory, memory, memory)


FORMAT = 5
"""Raised whenever the measured quantities change: a profile of another format is measured again."""


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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(f"this is not a machine profile: {error}") from None


def nominal_machine() -> MachineProfile:
    """Return an unmeasured machine with round figures: a server with a data-centre accelerator, for any CUDA device.

    Plans for other machines are searched with it, as the best placement depends on ratios that differ little between
    such machines. It is not used to predict seconds.
    """
    link = LinkSpeed(25e9, 10e-6)
    return MachineProfile(
        name="nominal figures, not measured",
        key="nominal",
        devices={"cpu": _host(), "cuda:0": _device(1e-12, 4e14, 5e-6)},
        links={"cuda:0": DeviceLinks(link, LinkSpeed(12e9, 10e-6), link, LinkSpeed(12e9, 10e-6), to_peer=link)},
        memory_rate=1e11,
        disk_cold=5e9,
        disk_warm=2e10,
        expert_overhead=ExpertOverhead(module=6.2e-4, chosen=4.6e-5, ahead=5.6e-5),
        cache_bytes=2**25,
        memory_bytes=2**39,
    )


def _host() -> DeviceSpeed:
    """Return a host that reads packed weights of 4 bits an eighth as long as float32, and of 8 bits a quarter."""
    read, operations = 2e-10, 2e11
    speed = _device(read, operations, 5e-6)
    packed = {f"{PRODUCT}:int{bits}": _product(read * bits / 32, operations / 2) for bits in (4, 8)}
    return replace(speed, curves={**speed.curves, **packed})


def _device(read: float, operations: float, call: float) -> DeviceSpeed:
    """Return a device that reads an element in `read` seconds and computes `operations` per second."""
    curve = _product(read, operations)
    return DeviceSpeed(
        {f"{PRODUCT}:float32": curve, f"{ATTENTION}:float32": curve, MOVE: Curve((1.0,), (read,))}, call, call
    )


def _product(read: float, operations: float) -> Curve:
    """Return the seconds of a product per element of its matrix, by rows."""
    per_row = 2 / operations
    rows = (1.0, 256.0)
    return Curve(rows, (max(read, per_row), max(read, per_row * rows[-1])), grows=True)
