"""Memory of a forward that is computed in micro-batches, several of which are in the stages of the model at once.

Each that is in flight takes what a forward of its rows alone does, from memory of its own: where allocators cache, what
one stream has given back is not given to another. The outputs of all are kept until the last one is there, and are then
joined, which takes them once more.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...devices.memory import CachingMemory
from ...devices.virtual.allocator import SMALL_SEGMENT
from ...limits import SPARE_MICRO_BATCHES
from ...profile import Profile
from ...profile.trace.ledger import replay
from ..result.budgets import Key
from .reserved import ReplayOptions, ReservedMemory, block_bytes


def most_in_flight(accelerators: int) -> int:
    """Return how many micro-batches are in flight over so many accelerators at most."""
    return accelerators + SPARE_MICRO_BATCHES


def in_flight(rows: int, size: int, accelerators: int) -> int:
    """Return how many micro-batches of `size` of so many rows are in flight over so many accelerators."""
    return min(-(-rows // size), most_in_flight(accelerators))


def micro_batch_peaks(profile: Profile, options: ReplayOptions) -> dict[Key, int]:
    """Return the peak bytes of activations and outputs on each device, of a forward over all rows of a profile.

    Args:
        profile: the model; its `micro_batch` is that of a forward of fewer rows.
        options: where its units run.
    """
    one = profile.micro_batch
    assert one is not None
    rows, size = profile.workload.batch_size, one.workload.batch_size
    count = -(-rows // size)
    flying = in_flight(rows, size, len({*options["execution_devices"].values()}))
    found: dict[Key, int] = {}
    for trace in (one.phases[0].trace_on(options["main"]), *one.phases[0].also):
        ledger = replay(trace, **_of_forward(options))
        for device, peak in ledger.peak.items():
            kept = max(ledger.now.get(device, 0), 0)
            found[device] = max(found.get(device, 0), flying * peak + (2 * count - flying) * kept)
    return found


def reserve_micro_batches(
    profile: Profile,
    memories: Mapping[Key, ReservedMemory],
    caching: Mapping[Key, CachingMemory],
    options: ReplayOptions,
) -> dict[Key, int]:
    """Count what allocators reserve of a forward in micro-batches, and return the bytes of its streams' workspaces.

    Args:
        profile: the model, as for `micro_batch_peaks`.
        memories: the memory of each device, whose peak is raised: what forwards of the whole batch have left cached is
            of other streams.
        caching: the allocators.
        options: where units run.
    """
    one = profile.micro_batch
    assert one is not None
    rows, size = profile.workload.batch_size, one.workload.batch_size
    count = -(-rows // size)
    used = {*options["execution_devices"].values()}
    flying = in_flight(rows, size, len(used))
    more: dict[Key, int] = {}
    for trace in (one.phases[0].trace_on(options["main"]), *one.phases[0].also):
        pools = {device: ReservedMemory() for device in memories if device in used}
        for device, pool in pools.items():
            if caching[device].workspace:
                pool.take(caching[device].workspace)

        def watch(device: Key, nbytes: int, storage: int | None, pools: dict[Key, ReservedMemory] = pools) -> None:
            if device in pools:
                pools[device].change(nbytes, storage)

        ledger = replay(trace, **_of_forward(options), watch=watch)
        for device, pool in pools.items():
            outputs = ReservedMemory()
            kept = max(ledger.now.get(device, 0), 0)
            for _ in range(2 * count - flying if kept else 0):
                outputs.take(block_bytes(kept))
            more[device] = max(more.get(device, 0), flying * (pool.peak + SMALL_SEGMENT) + outputs.peak)
    for device, nbytes in more.items():
        memories[device].peak += nbytes
    return {device: flying * caching[device].workspace for device in more}


def _of_forward(options: ReplayOptions) -> ReplayOptions:
    """Return the options for a forward that is called by itself: its inputs lie on the main device, and its outputs go
    there."""
    found = options.copy()
    found["input_device"] = options["main"]
    return found
