"""Keys and values that lie on the host while their unit runs on an accelerator: the profile of that, and its bytes.

They are fetched ahead of each call into slots of the accelerator, and the call's own are appended there and copied to
the host. What attention reads is put together from both, as `DynamicCache` does, and freed when the unit ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from ...devices import DISK, HOST
from ...limits import KV_BLOCK_BYTES, KV_BLOCKS, KV_PAGE, KV_SLOTS, KV_SPARE_PAGES, READERS, STAGING_BYTES
from ...profile import Profile
from ...profile.trace.events import OUTSIDE, Allocate, Enter, Event, Free, Leave
from ...profile.trace.trace import Trace
from ..result.budgets import Key, is_accelerator
from .reserved import block_bytes
from .staging import staging
from .usage import KV_CACHE, SLOTS

__all__ = [
    "KV_SLOTS",
    "fetched_kv",
    "gathered_kv",
    "kv_blocks",
    "kv_on_disk",
    "kv_on_host",
    "kv_slots",
    "least_in_ram",
    "least_pages",
    "rows_on_disk",
    "staged_kv",
    "with_kv_on_host",
]


def kv_blocks(row_bytes: int, planned: int, in_ram: int = 0) -> tuple[int, int]:
    """Return the tokens of a block of one layer's keys, or values, on the host, and the most blocks that RAM holds.

    Args:
        row_bytes: bytes of one token of all sequences.
        planned: planned tokens of a sequence.
        in_ram: tokens of each sequence that RAM holds at most; 0: all, in any number of blocks, which is 0 then.
    """
    most = max(1, KV_BLOCK_BYTES // max(row_bytes, 1))
    if not in_ram:
        return max(1, min(most, planned)), 0
    size = max(1, min(most, in_ram // KV_BLOCKS))
    return size, in_ram // size


def rows_on_disk(row_bytes: int, planned: int, in_ram: int) -> int:
    """Return the tokens of each sequence that are on disk once there are `planned`; arguments as for `kv_blocks`."""
    size, most = kv_blocks(row_bytes, planned, in_ram)
    return size * max(0, -(-planned // size) - most) if most else 0


def least_pages(sequences: int, tokens: int) -> int:
    """Return how many pages of a server RAM holds at least: those that a step writes to, and those that were written to
    disk ahead.

    Args:
        sequences: sequences of a step; each may write to two pages, where tokens are proposed.
        tokens: tokens of a step.
    """
    return 2 * sequences + -(-tokens // KV_PAGE) + KV_SPARE_PAGES


def least_in_ram(profile: Profile) -> int:
    """Return how many tokens of each sequence RAM holds at least where older ones lie on disk."""
    if not profile.gathers_kv:
        return 1
    workload = profile.workload
    chunk = min(workload.prefill_chunk_size or 0, workload.context_length)
    tokens = workload.batch_size * chunk
    pages = least_pages(workload.batch_size, max(tokens, workload.batch_size + KV_PAGE))
    return -(-pages * KV_PAGE // workload.batch_size)


def with_kv_on_host(profile: Profile, units: Collection[int], in_ram: int = 0) -> Profile:
    """Return the profile of a model whose keys and values of `units`, positions, lie on the host.

    Args:
        profile: the model.
        units: positions of units.
        in_ram: most recent tokens of each sequence that RAM holds; older ones lie on disk. 0: it holds all.
    """
    kept = frozenset(units)
    held = tuple(nbytes if index in kept else 0 for index, nbytes in enumerate(profile.kv_cache))
    phases = tuple(phase.with_traces(lambda trace: _known_without_kept(trace, kept)) for phase in profile.phases)
    return replace(profile, phases=phases, kv_on_host=held, kv_in_ram=in_ram)


MOST_KNOWN = 16
"""Sets of units for which a trace without what they keep is remembered: a search asks for few, again and again."""


def _known_without_kept(trace: Trace, units: frozenset[int]) -> Trace:
    known: dict[frozenset[int], Trace] = trace.changed.setdefault(_without_kept, {})
    found = known.pop(units, None) or _without_kept(trace, units)
    known[units] = found
    if len(known) > MOST_KNOWN:
        del known[next(iter(known))]
    return found


def _without_kept(trace: Trace, units: frozenset[int]) -> Trace:
    """Return a trace in which what `units` keep is not there before, and is freed when they end."""
    before = [held for held in trace.initial if held.unit in units]
    gone = {held.storage for held in before}
    left = _left_by_unit(trace.events, units)
    events = [
        event for event in _freed_at_end(trace.events, left) if not (isinstance(event, Free) and event.storage in gone)
    ]
    return Trace(events, [held for held in trace.initial if held.unit not in units])


def _left_by_unit(events: Iterable[Event], units: frozenset[int]) -> dict[int, list[int]]:
    """Return the storages that each of `units` has allocated and that are never freed."""
    made: dict[int, int] = {}
    unit = OUTSIDE
    for event in events:
        if isinstance(event, Allocate) and unit in units:
            made[event.storage] = unit
        elif isinstance(event, Free):
            made.pop(event.storage, None)
        elif isinstance(event, Enter):
            unit = event.unit
        elif isinstance(event, Leave):
            unit = OUTSIDE
    found: dict[int, list[int]] = {}
    for storage, at in made.items():
        found.setdefault(at, []).append(storage)
    return found


def _freed_at_end(events: Iterable[Event], left: dict[int, list[int]]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Leave):
            yield from map(Free, left.get(event.unit, ()))
        yield event


def staged_kv(on_disk: Iterable[int]) -> list[int]:
    """Return the bytes of the keys on disk, and of the values, of units that have so many of both."""
    return [part for nbytes in on_disk for part in (nbytes - nbytes // 2, nbytes // 2)]


def fetched_kv(profile: Profile, execution: Sequence[Key]) -> list[int]:
    """Return the units whose keys and values lie on the host and are fetched to where they run."""
    return [index for index, nbytes in enumerate(profile.kv_on_host) if nbytes and is_accelerator(execution[index])]


def kv_slots(profile: Profile, execution: Sequence[Key]) -> dict[Key, list[int]]:
    """Return the bytes of each tensor that keys or values are fetched into, by accelerator: keys and values have one
    each in each slot, and are taken to be as large."""
    largest: dict[Key, int] = {}
    for index in fetched_kv(profile, execution):
        largest[execution[index]] = max(largest.get(execution[index], 0), profile.kv_on_host[index])
    return {device: [nbytes - nbytes // 2, nbytes // 2] * KV_SLOTS for device, nbytes in largest.items()}


def gathered_kv(profile: Profile, execution: Sequence[Key]) -> dict[Key, list[int]]:
    """Return the bytes of the keys, and of the values, that attention gathers from pages on each accelerator: those of
    the unit that has most."""
    if not profile.gathers_kv:
        return {}
    largest: dict[Key, int] = {}
    for index, nbytes in enumerate(profile.kv_cache):
        if is_accelerator(execution[index]) and nbytes and not (profile.kv_on_host and profile.kv_on_host[index]):
            largest[execution[index]] = max(largest.get(execution[index], 0), nbytes)
    return {device: [nbytes - nbytes // 2, nbytes // 2] for device, nbytes in largest.items()}


def kv_on_disk(profile: Profile, execution: Sequence[Key]) -> dict[int, int]:
    """Return the bytes of keys and values on disk at full context, by the position of their unit."""
    return {index: there for index, (_, there) in _in_ram_and_on_disk(profile, execution).items()}


def _in_ram_and_on_disk(profile: Profile, execution: Sequence[Key]) -> dict[int, tuple[int, int]]:
    """Return the bytes of keys and values in RAM and on disk, of each unit that has any there."""
    if not profile.kv_in_ram:
        return {}
    tokens, sequences = profile.workload.context_length, profile.workload.batch_size
    found = {}
    for index in fetched_kv(profile, execution):
        row = profile.kv_on_host[index] // tokens
        if profile.gathers_kv:
            page = KV_PAGE * row // sequences
            pages, held = -(-tokens * sequences // KV_PAGE), profile.kv_in_ram * sequences // KV_PAGE
            found[index] = page * held, page * (max(pages - held, 0) + KV_SPARE_PAGES)
        else:
            size, most = kv_blocks(row // 2, tokens, profile.kv_in_ram)
            found[index] = row * size * most, row * rows_on_disk(row // 2, tokens, profile.kv_in_ram)
    return found


def kv_on_host(
    profile: Profile,
    execution: Sequence[Key],
    caching: Collection[Key] = (),
    staging_bytes: int = STAGING_BYTES,
    readers: int = READERS,
) -> Iterator[tuple[Key, str, int]]:
    """Yield device, purpose and bytes of what keys and values on the host take: whole blocks there, slots elsewhere;
    and where older ones are on disk, their bytes there, and the memory through which they reach each accelerator."""
    fetched = fetched_kv(profile, execution)
    divided = _in_ram_and_on_disk(profile, execution)
    on_disk = {index: there for index, (_, there) in divided.items()}
    for index, nbytes in enumerate(profile.kv_on_host):
        if index in divided:
            yield HOST, KV_CACHE, divided[index][0]
            yield DISK, KV_CACHE, on_disk[index]
            continue
        in_blocks = index in fetched and not profile.gathers_kv
        spare = 2 * KV_BLOCK_BYTES if in_blocks and nbytes > KV_BLOCK_BYTES else 0
        yield HOST, KV_CACHE, nbytes + spare
    for device in {execution[index] for index in on_disk}:
        there = [on_disk[index] for index in on_disk if execution[index] == device]
        yield HOST, SLOTS, staging(staged_kv(there), staging_bytes, readers)
    for device, sizes in kv_slots(profile, execution).items():
        yield device, SLOTS, sum(map(block_bytes, sizes) if device in caching else sizes)
