"""Staging memory: how much is planned, and in which chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.devices.pinned import pinned_bytes
from bigmodel.limits import (
    ALIGNMENT,
    CHUNK_BYTES,
    FILE_ALIGNMENT,
    GRADIENT_BYTES,
    MIN_CHUNK_BYTES,
    MOST_CHUNK_BYTES,
    STAGING_BYTES,
)
from bigmodel.plan.memory.staging import (
    StagingMemory,
    gradient_bytes,
    staging,
    staging_memory,
    upload_bytes,
    upload_memory,
)

MiB = 2**20


def test_two_blocks_are_staged_at_most() -> None:
    assert staging([]) == 0
    assert staging([10, 30]) == 40
    assert staging([10, 30, 30]) == 60
    assert staging([STAGING_BYTES, STAGING_BYTES]) == STAGING_BYTES
    assert staging_memory([16 * MiB] * 9) == StagingMemory(4 * MiB, 8)


def test_the_largest_blocks_are_staged_in_six_chunks() -> None:
    assert staging_memory([STAGING_BYTES] * 2) == StagingMemory(CHUNK_BYTES, 6)


def test_more_readers_have_larger_chunks_and_two_more_than_they_fill() -> None:
    blocks = [2**30] * 2
    chunks = [staging_memory(blocks, STAGING_BYTES // 2 * readers, readers) for readers in (2, 4, 8)]
    large = MOST_CHUNK_BYTES
    assert chunks == [StagingMemory(CHUNK_BYTES, 6), StagingMemory(large, 6), StagingMemory(large, 12)]


@pytest.mark.parametrize("nbytes", [0, 1, FILE_ALIGNMENT])
def test_what_is_smallest_takes_two_pages(nbytes: int) -> None:
    assert staging_memory([nbytes]) == StagingMemory(FILE_ALIGNMENT, 2)


@given(st.lists(st.integers(1, 2**28), max_size=5), st.integers(1, 10**8), st.integers(1, 8))
def test_chunks_take_what_is_planned_also_when_they_are_pinned(blocks: list[int], most: int, readers: int) -> None:
    found = staging_memory(blocks, most, readers)
    pages = 2 * FILE_ALIGNMENT
    wanted = min(sum(blocks), 2 * max(blocks, default=0), most)
    assert found.chunk_bytes % FILE_ALIGNMENT == 0
    assert found.chunks * pinned_bytes(found.chunk_bytes) == found.nbytes <= max(wanted, pages)
    assert found.nbytes == staging(blocks, most, readers) or wanted < pages
    assert found.nbytes > max(wanted, pages) - found.chunk_bytes
    assert found.chunks >= 2
    assert found.chunk_bytes >= MIN_CHUNK_BYTES or found.chunks <= 3


def test_a_checkpoint_is_loaded_through_as_much_as_two_of_its_tensors_take() -> None:
    assert upload_bytes({}, None) == upload_bytes({0: []}, None) == 0
    assert upload_bytes({0: [MiB, MiB, MiB]}, None) == 2 * MiB
    assert upload_bytes({0: [2**30] * 3}, None) == STAGING_BYTES
    assert upload_bytes({0: [2**30] * 3, 1: [MiB]}, None) == STAGING_BYTES


def test_accelerators_share_what_the_host_has_left_for_loading() -> None:
    both = {0: [2**30] * 3, 1: [2**30] * 3}
    assert upload_bytes(both, 16 * MiB) == 8 * MiB
    assert upload_bytes(both, 2 * FILE_ALIGNMENT) == 0


@given(st.lists(st.integers(1, 2**28), min_size=1, max_size=5), st.integers(0, 10**8))
def test_what_is_planned_for_loading_is_what_the_loader_pins(tensors: list[int], most: int) -> None:
    planned = upload_bytes({0: tensors}, most)
    found = upload_memory(planned)
    assert found.chunks * pinned_bytes(found.chunk_bytes) == found.nbytes == planned <= most


def test_gradients_of_the_largest_block_decide() -> None:
    assert gradient_bytes([]) == gradient_bytes([[]]) == 0
    assert gradient_bytes([[1], [5000, 3000 - 2 * ALIGNMENT]]) == 8192
    assert gradient_bytes([[2**30]]) == GRADIENT_BYTES == pinned_bytes(GRADIENT_BYTES)
    assert gradient_bytes([[2**30]], 2**20 + 1) == 2**20
    assert gradient_bytes([[2**30]], 1) == 0
