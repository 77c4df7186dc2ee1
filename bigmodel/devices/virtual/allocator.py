"""Bookkeeping of a device's memory: no memory, only addresses and sizes.

`ExactAllocator` counts to the byte. `CachingAllocator` has the rules of PyTorch's for CUDA:

rounding    a block takes a multiple of 512 bytes
pools       blocks of at most 1 MiB are small: their segments have 2 MiB. Segments of larger ones have 20 MiB, and
            from 10 MiB on, the block's size rounded up to 2 MiB. Each stream has pools of its own
best fit    the smallest free block of the stream's pool that is large enough, the lowest of equal ones
splitting   what is left over becomes a free block: in a small segment if it is at least 512 bytes, in a large one
            if it is more than 1 MiB; else the block keeps it
freeing     a block is free for its stream at once, and merges with free neighbours; if other streams use it, when
            they have finished
shortage    if the device has no room for another segment, all segments without a block in use are given back
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ROUNDING = 512
SMALL = 2**20
"""Largest block of the small pools."""

SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
OWN_SEGMENT = 10 * 2**20
"""Blocks of at least so many bytes have segments of their own size, rounded up to `SEGMENT_ROUNDING`."""

SEGMENT_ROUNDING = 2 * 2**20


class NoRoom(Exception):
    """The device has no room for what was asked for."""


@dataclass
class Counter:
    """A number of bytes, and its peak."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int, beyond: bool = False) -> None:
        """Add bytes; those `beyond` the capacity are no peak."""
        self.now += nbytes
        if self.now > self.peak and not beyond and nbytes > 0:
            self.peak = self.now

    def reset_peak(self) -> None:
        self.peak = self.now


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A range of one segment.

    Attributes:
        address: Where it begins, in the device's address space.
        nbytes: Its bytes.
        pool: Its pool: the stream, and whether it is small.
        requested: Bytes that were asked for; 0 if it is free.
        before, after: Its neighbours in the segment.
    """

    address: int
    nbytes: int
    pool: tuple[int, bool]
    requested: int = 0
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    in_use: bool = False

    @property
    def is_segment(self) -> bool:
        """Whether it is a whole segment."""
        return self.before is None and self.after is None


@dataclass
class ExactAllocator:
    """Counts bytes as they are asked for. Attributes and methods are those of `CachingAllocator`."""

    capacity: int | None = None
    context: int = 0

    def __post_init__(self) -> None:
        self.requested = self.allocated = self.reserved = Counter()

    def allocate(self, nbytes: int, stream: int = 0, beyond: bool = False) -> MemoryBlock:
        if not beyond and self.capacity is not None and self.allocated.now + nbytes > self.capacity:
            raise NoRoom
        self.allocated.add(nbytes, beyond)
        return MemoryBlock(0, nbytes, (stream, False), nbytes)

    def free(self, block: MemoryBlock, used_until: Sequence[Callable[[], bool]] = ()) -> None:
        self.allocated.add(-block.nbytes)

    def recount(self, in_use: Sequence[MemoryBlock]) -> None:
        self.allocated.now = sum(block.nbytes for block in in_use)

    def empty_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def reset_peaks(self) -> None:
        self.allocated.reset_peak()


@dataclass
class CachingAllocator:
    """The blocks and segments of one device.

    Args:
        capacity: Bytes of the device; None for no limit.
        context: Bytes of it that are never given to tensors.

    Attributes:
        requested: Bytes that tensors asked for.
        allocated: Bytes of the blocks that they were given.
        reserved: Bytes of all segments.
    """

    capacity: int | None = None
    context: int = 0
    requested: Counter = field(default_factory=Counter)
    allocated: Counter = field(default_factory=Counter)
    reserved: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.limit: int | None = None
        """Most bytes to be reserved, context not counted; None: as the capacity allows."""
        self._segments: dict[int, tuple[int, tuple[int, bool]]] = {}
        self._free: dict[tuple[int, bool], list[tuple[int, int, MemoryBlock]]] = {}
        self._waiting: list[tuple[MemoryBlock, list[Callable[[], bool]]]] = []
        self._end = 0

    def allocate(self, nbytes: int, stream: int = 0, beyond: bool = False) -> MemoryBlock:
        """Return a block of at least `nbytes` for work of `stream`; `beyond`: whether there is room or not.

        Raises:
            NoRoom: There is no such block, and no room for a segment. Free segments have been given back.
        """
        self._collect()
        size = rounded(nbytes)
        pool = stream, size <= SMALL
        block = self._best_fit(pool, size) or self._new_segment(pool, size, beyond)
        self._split(block, size)
        block.in_use, block.requested = True, nbytes
        self.requested.add(nbytes, beyond)
        self.allocated.add(block.nbytes, beyond)
        return block

    def free(self, block: MemoryBlock, used_until: Sequence[Callable[[], bool]] = ()) -> None:
        """Take a block back.

        Args:
            block: Returned by `allocate`, and not freed since.
            used_until: Tell whether the work of other streams that use it has finished; it stays theirs before.
        """
        self.requested.add(-block.requested)
        self.allocated.add(-block.nbytes)
        block.requested = 0
        if used_until:
            self._waiting.append((block, list(used_until)))
        else:
            self._release(block)

    def empty_cache(self) -> None:
        """Give all segments back that have no block in use."""
        self._collect()
        for pool in self._free.values():
            kept = [entry for entry in pool if not entry[2].is_segment]
            for nbytes, address, block in pool:
                if block.is_segment:
                    self.reserved.add(-nbytes)
                    del self._segments[address]
            pool[:] = kept

    def recount(self, in_use: Sequence[MemoryBlock]) -> None:
        """Rebuild all books, after a call that was interrupted.

        Args:
            in_use: All blocks that were returned by `allocate` and not given to `free`.
        """
        taken = sorted((*in_use, *(block for block, _ in self._waiting)), key=lambda block: block.address)
        self._free = {}
        for begin, (nbytes, pool) in self._segments.items():
            last, at = None, begin
            for block in [each for each in taken if begin <= each.address < begin + nbytes]:
                last = self._chained(last, at, block.address, pool)
                block.before, block.in_use = last, True
                if last is not None:
                    last.after = block
                last, at = block, block.address + block.nbytes
            last = self._chained(last, at, begin + nbytes, pool)
            if last is not None:
                last.after = None
        self.requested.now = sum(block.requested for block in in_use)
        self.allocated.now = sum(block.nbytes for block in in_use)
        self.reserved.now = sum(nbytes for nbytes, _ in self._segments.values())

    def _chained(self, last: MemoryBlock | None, begin: int, end: int, pool: tuple[int, bool]) -> MemoryBlock | None:
        """Return the last block before `end`: a new, free one after `last` if anything is left, else `last`."""
        if begin == end:
            return last
        rest = MemoryBlock(begin, end - begin, pool, before=last)
        if last is not None:
            last.after = rest
        self._insert(rest)
        return rest

    def reset_peaks(self) -> None:
        """Reset all peaks to what is in use now."""
        for counter in (self.requested, self.allocated, self.reserved):
            counter.reset_peak()

    def _best_fit(self, pool: tuple[int, bool], size: int) -> MemoryBlock | None:
        free = self._free.setdefault(pool, [])
        index = bisect.bisect_left(free, (size, -1), key=lambda entry: entry[:2])
        return free.pop(index)[2] if index < len(free) else None

    def _new_segment(self, pool: tuple[int, bool], size: int, beyond: bool) -> MemoryBlock:
        nbytes = segment_bytes(size)
        if not self._has_room(nbytes):
            self.empty_cache()
            if not beyond and not self._has_room(nbytes):
                raise NoRoom
        block = MemoryBlock(self._end, nbytes, pool)
        self._end += nbytes
        self._segments[block.address] = nbytes, pool
        self.reserved.add(nbytes, beyond)
        return block

    def _has_room(self, nbytes: int) -> bool:
        after = self.reserved.now + nbytes
        if self.limit is not None and after > self.limit:
            return False
        return self.capacity is None or self.context + after <= self.capacity

    def _split(self, block: MemoryBlock, size: int) -> None:
        left = block.nbytes - size
        if left < ROUNDING if block.pool[1] else left <= SMALL:
            return
        rest = MemoryBlock(block.address + size, left, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, size
        self._insert(rest)

    def _release(self, block: MemoryBlock) -> None:
        """Make a block free, merged with its free neighbours."""
        block.in_use = False
        for neighbour in (block.before, block.after):
            if neighbour is None or neighbour.in_use:
                continue
            self._free[block.pool].remove((neighbour.nbytes, neighbour.address, neighbour))
            if neighbour is block.before:
                block.address, block.before = neighbour.address, neighbour.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = neighbour.after
                if block.after is not None:
                    block.after.before = block
            block.nbytes += neighbour.nbytes
        self._insert(block)

    def _insert(self, block: MemoryBlock) -> None:
        entry = block.nbytes, block.address, block
        bisect.insort(self._free.setdefault(block.pool, []), entry, key=lambda entry: entry[:2])

    def _collect(self) -> None:
        """Release blocks whose users have finished."""
        for entry in list(self._waiting):
            block, unfinished = entry
            unfinished[:] = [done for done in unfinished if not done()]
            if not unfinished:
                self._waiting.remove(entry)
                self._release(block)


def rounded(nbytes: int) -> int:
    """Return the bytes of the block for a request of `nbytes`, without what is left over of a larger one."""
    return max(ROUNDING, -(-nbytes // ROUNDING) * ROUNDING)


def segment_bytes(size: int) -> int:
    """Return the bytes of a new segment for a block of `size`."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
