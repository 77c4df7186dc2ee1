"""The virtual accelerator: a device type with N devices, each with a capacity and a link of a given bandwidth.

It makes placement, budgets, out-of-memory behaviour and transfer overlap testable, exactly, on a machine without an
accelerator. Elements are in host memory and operations run on the CPU, so results are real.

A strict one has streams, events and pinned memory, and punishes what CUDA leaves to the programmer: copies arrive as
late as events allow, and accesses of two streams that no event orders raise `RaceError`. It has no set bandwidth: on a
link of a set speed copies take real time, in threads, and order is not checked.

One that computes at a set speed (`flops`) has streams and events, too: they tell when it would have computed what was
launched (`clock`).

Every operation that the CPU has runs, but for those with sparse or nested tensors, which raise NotImplementedError.

    from bigmodel.devices import virtual

    virtual.enable(count=2, capacity="1GiB", bandwidth=2e9)
    x = torch.ones(4, device="virtual:1")
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import DeviceError
from ..sizes import parse_size
from .arena import Arena, Caching
from .backend import register
from .clock import ComputeClock
from .environment import from_environment, late_from_environment, strict_from_environment
from .link import VirtualLink
from .pinned import pinned_memory
from .postponing import guard_hooks
from .races import detector
from .schedule import HostWaits
from .streams import TYPE, Event, Stream, current_stream, default_stream, host_waits, set_schedule, stream
from .tensor import VirtualTensor, board, user_attributes

__all__ = [
    "TYPE",
    "Caching",
    "Event",
    "HostWaits",
    "Stream",
    "VirtualLink",
    "VirtualTensor",
    "board",
    "configure",
    "count",
    "current_stream",
    "default_stream",
    "disable",
    "enable",
    "guard_hooks",
    "host_waits",
    "link",
    "pinned_memory",
    "races",
    "stream",
    "user_attributes",
]

Capacity = int | str | None


def enable(
    count: int = 2,
    capacity: Capacity | Sequence[Capacity] = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
    strict: bool | None = None,
    seed: int | None = None,
    caching: Caching | None = None,
    late_compute: bool | None = None,
    launch_cost: float = 0.0,
    flops: float | None = None,
) -> None:
    """Make `count` virtual accelerators available as ``"virtual:0"``, ``"virtual:1"``, ...

    Called again, it changes capacities and links; the memory of existing tensors stays allocated, but where memory is
    or becomes cached: there, they are no longer counted. A thread that uses
    virtual tensors runs its backward passes itself, not in autograd's device threads.

    Args:
        count: Number of devices.
        capacity: Bytes of each device (an int, text such as ``"1GiB"``, or None for no limit), or a list of one per
            device.
        bandwidth: Bytes per second of each device's link in each direction; None for no limit.
        latency: Seconds per copy over a link, in addition to ``nbytes / bandwidth``.
        strict: Check the order of streams, on devices without a bandwidth; None: if ``BIGMODEL_VIRTUAL_STRICT`` is set.
        seed: How late strict accelerators do what may be late: at random, the same for the same seed; None: as late as
            they may.
        late_compute: Compute after operations were launched, too, on strict accelerators; None: if
            ``BIGMODEL_VIRTUAL_STRICT`` is ``late``.
        caching: Give memory out as PyTorch's allocator for CUDA does, rounded and in segments; None: to the byte.
        launch_cost: Seconds that the host is busy with each operation or copy that it launches, besides what Python
            takes: views and new memory without elements are none.
        flops: Multiplications and additions per second of products on each device, which then computes beside the
            host; None: as fast as the host computes them, while it waits. Devices with a set speed are not strict, and
            have no bandwidth.

    Raises:
        DeviceError: A number is negative, or the number of capacities differs from `count`. Nothing is changed.
        SizeError: A capacity is not a size. Nothing is changed.
    """
    if min(count, bandwidth or 0, latency, launch_cost, flops or 0) < 0:
        raise DeviceError(
            f"count {count}, bandwidth {bandwidth}, latency {latency}, launch_cost {launch_cost} and flops {flops} "
            "must not be negative"
        )
    if flops and bandwidth:
        raise DeviceError("virtual accelerators have either a bandwidth or flops: give one of them")
    given = list(capacity) if isinstance(capacity, (list, tuple)) else [capacity] * count
    if len(given) != count:
        raise DeviceError(f"{len(given)} capacities were given for {count} virtual accelerators")
    capacities = [None if size is None else parse_size(size) for size in given]  # type: ignore[arg-type]
    register()
    board.strict = strict_from_environment() if strict is None else strict
    set_schedule(board.strict, seed, late_from_environment() if late_compute is None else late_compute)
    for index in range(count):
        if index < len(board.arenas) and (caching is not None or board.arenas[index].is_caching):
            board.arenas[index] = Arena(index, caching=caching)
        if index == len(board.arenas):
            board.arenas.append(Arena(index, caching=caching))
            board.links.append(VirtualLink())
            board.clocks.append(ComputeClock())
        configure(index, capacities[index], bandwidth, latency, launch_cost, flops)
    del board.arenas[count:], board.links[count:], board.clocks[count:]


def configure(
    index: int,
    capacity: Capacity = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
    launch_cost: float = 0.0,
    flops: float | None = None,
) -> None:
    """Set one device as `enable` sets all, and reset its peak."""
    arena, link_ = board.arena(index), board.links[index]
    arena.capacity = None if capacity is None else parse_size(capacity)
    arena.reset_peak()
    link_.bandwidth, link_.latency, link_.launch_cost = bandwidth, latency, launch_cost
    board.clocks[index].flops = flops or None
    arena.strict = board.strict and not (bandwidth or flops)


def disable() -> None:
    """Remove all virtual accelerators. Existing tensors can no longer be used in new operations."""
    board.arenas.clear()
    board.links.clear()
    board.clocks.clear()


def races() -> list[str]:
    """Return the races found since this was last asked: those that were raised, and memory freed too early."""
    with detector.lock:
        found, detector.reports[:] = list(detector.reports), []
    return found


def count() -> int:
    """Return how many virtual accelerators are enabled."""
    return len(board.arenas)


def enable_from_environment() -> None:
    """Enable the virtual accelerators that the environment variable ``BIGMODEL_VIRTUAL`` describes, if it is set."""
    wanted = from_environment()
    if wanted is not None:
        count_, capacity, bandwidth = wanted
        enable(count_, capacity, bandwidth)


def link(index: int) -> VirtualLink:
    """Return the link of device `index`, with its counters of bytes moved; RuntimeError if there is no such device."""
    board.arena(index)
    return board.links[index]
