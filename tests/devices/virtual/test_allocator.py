"""The caching allocator against examples worked out by hand from PyTorch's rules, and its invariants."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.devices.virtual.allocator import CachingAllocator, MemoryBlock, NoRoom, rounded, segment_bytes

KiB, MiB = 2**10, 2**20


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (10 * MiB + 1, 10 * MiB + 512, 12 * MiB),
        (21 * MiB, 21 * MiB, 22 * MiB),
    ],
)
def test_sizes_are_rounded_as_pytorch_rounds_them(nbytes: int, block: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert rounded(nbytes) == block
    assert segment_bytes(block) == segment
    assert (allocator.requested.now, allocator.reserved.now) == (nbytes, segment)


def test_a_large_block_keeps_what_is_left_over_up_to_a_mebibyte() -> None:
    """21 MiB lie in a segment of 22 MiB, whose last one is not split off; of 12.9 MiB in 20 MiB, 7.1 MiB are."""
    allocator = CachingAllocator()
    allocator.allocate(21 * MiB)
    assert allocator.allocated.now == 22 * MiB
    allocator = CachingAllocator()
    allocator.allocate(9 * MiB)
    assert allocator.allocated.now == 9 * MiB
    allocator.allocate(10 * MiB)
    assert allocator.reserved.now == 20 * MiB
    assert allocator.allocated.now == 20 * MiB, "the second takes the 11 MiB left of the first segment"


def test_small_blocks_share_a_segment_to_the_last_512_bytes() -> None:
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.allocate(512)
    assert allocator.reserved.now == 2 * MiB
    allocator.allocate(1)
    assert allocator.reserved.now == 4 * MiB


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * KiB) for size in (64, 8, 32, 8, 32, 8)]
    for block in (blocks[0], blocks[2], blocks[4]):
        allocator.free(block)
    assert allocator.allocate(20 * KiB).address == blocks[2].address
    assert allocator.allocate(30 * KiB).address == blocks[4].address
    assert allocator.allocate(40 * KiB).address == 0


def test_free_neighbours_merge() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(512 * KiB) for _ in range(4)]
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    assert allocator.allocate(MiB).address == 0
    assert allocator.allocate(512 * KiB).address == MiB
    assert allocator.reserved.now == 2 * MiB


def test_memory_is_used_again_at_once_by_its_own_stream_only() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(MiB, stream=1)
    allocator.free(first)
    assert allocator.allocate(MiB, stream=2).address != first.address
    assert allocator.reserved.now == 4 * MiB
    assert allocator.allocate(MiB, stream=1).address == first.address


def test_memory_that_another_stream_uses_is_free_when_that_has_finished() -> None:
    allocator, finished = CachingAllocator(), [False]
    first = allocator.allocate(MiB)
    allocator.free(first, [lambda: finished[0]])
    assert allocator.allocated.now == 0
    assert allocator.allocate(MiB).address == MiB
    finished[0] = True
    assert allocator.allocate(MiB).address == 0


def test_segments_without_a_block_in_use_are_given_back() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (MiB, MiB, 16 * MiB)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.empty_cache()
    assert allocator.reserved.now == 2 * MiB
    assert allocator.reserved.peak == 18 * MiB
    allocator.reset_peaks()
    assert allocator.reserved.peak == 2 * MiB


def test_cached_segments_make_room_before_memory_runs_out() -> None:
    allocator = CachingAllocator(capacity=32 * MiB, context=8 * MiB)
    first = allocator.allocate(12 * MiB)
    allocator.free(first)
    allocator.allocate(20 * MiB)
    assert allocator.reserved.now == 20 * MiB
    with pytest.raises(NoRoom):
        allocator.allocate(5 * MiB)


def test_fragments_can_make_memory_run_out() -> None:
    """Half of each segment is free, and no segment as a whole."""
    allocator = CachingAllocator(capacity=40 * MiB)
    blocks = [allocator.allocate(9 * MiB) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    assert allocator.reserved.now - allocator.allocated.now > 18 * MiB
    with pytest.raises(NoRoom):
        allocator.allocate(18 * MiB)


sizes = st.one_of(st.integers(1, 4096), st.integers(1, 2 * MiB), st.integers(1, 40 * MiB))


@pytest.mark.slow
@given(data=st.data())
def test_blocks_in_use_never_overlap_and_counters_add_up(data: st.DataObject) -> None:
    allocator = CachingAllocator()
    held: list[tuple[MemoryBlock, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if held and data.draw(st.booleans()):
            block, _ = held.pop(data.draw(st.integers(0, len(held) - 1)))
            allocator.free(block)
        else:
            nbytes = data.draw(sizes)
            held.append((allocator.allocate(nbytes, stream=data.draw(st.integers(0, 1))), nbytes))
        check(allocator, held)
        before = books(allocator)
        allocator.recount([block for block, _ in held])
        assert books(allocator) == before
    for block, _ in held:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.requested.now, allocator.allocated.now, allocator.reserved.now) == (0, 0, 0)


def books(allocator: CachingAllocator) -> Any:
    counters = allocator.requested.now, allocator.allocated.now, allocator.reserved.now
    return counters, {pool: [entry[:2] for entry in free] for pool, free in allocator._free.items() if free}


def check(allocator: Any, held: list[tuple[MemoryBlock, int]]) -> None:
    ranges = sorted((block.address, block.address + block.nbytes) for block, _ in held)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    assert all(block.nbytes >= nbytes and block.address % 512 == 0 for block, nbytes in held)
    assert allocator.requested.now == sum(nbytes for _, nbytes in held)
    assert allocator.allocated.now == sum(block.nbytes for block, _ in held)
    assert allocator.requested.now <= allocator.allocated.now <= allocator.reserved.now <= allocator.reserved.peak
