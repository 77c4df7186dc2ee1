"""What is read of blocks that nobody has asked for yet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from bigmodel.dispatch.transfer.files import SourceFiles
from bigmodel.dispatch.transfer.read_job import Read
from bigmodel.dispatch.transfer.read_plan import Chunk, ReadPlan, plan_reads
from bigmodel.dispatch.transfer.speculative_reads import SpeculativeReads
from bigmodel.dispatch.transfer.staging import StagingSlots
from bigmodel.dispatch.weights.block import Block
from bigmodel.plan import StagingMemory

from ..mapped_files import Registry, streamed_blocks

CHUNK = 8192


def begin(chunk: Chunk) -> Read:
    """Return a read that has ended well."""
    staged: Future[torch.Tensor] = Future()
    staged.set_result(torch.zeros(chunk.nbytes, dtype=torch.uint8))
    return Read(chunk, StagingSlots(StagingMemory(CHUNK, 6), pin=False).free[0], staged)


@pytest.fixture
def made(tmp_path: Path) -> tuple[list[Block], list[Registry]]:
    """Three blocks of two chunks or three each."""
    return streamed_blocks(tmp_path, count=3, elements=2 * CHUNK // 4)


@pytest.fixture
def plan() -> Callable[[Block], ReadPlan]:
    files = SourceFiles()
    return lambda block: plan_reads(block, files, CHUNK)


def reads_ahead(reads: SpeculativeReads, plan: Callable[[Block], ReadPlan], count: int) -> None:
    for _ in range(count):
        assert reads.next_read(plan, begin)


def test_expected_blocks_are_read_one_after_the_other_and_no_others(
    made: tuple[list[Block], list[Registry]], plan: Callable[[Block], ReadPlan]
) -> None:
    first, second, _ = made[0]
    reads = SpeculativeReads()
    assert not reads.next_read(plan, begin)
    reads.expect([first, second])
    reads_ahead(reads, plan, len(plan(first).chunks) + len(plan(second).chunks))
    assert not reads.next_read(plan, begin)
    for block in (first, second):
        begun = reads.take(block, plan(block))
        assert [read.chunk for read in begun] == list(plan(block).chunks)


def test_a_block_that_is_asked_for_takes_over_what_has_begun_and_is_expected_no_more(
    made: tuple[list[Block], list[Registry]], plan: Callable[[Block], ReadPlan]
) -> None:
    first, second, _ = made[0]
    reads = SpeculativeReads()
    reads.expect([first, second])
    reads_ahead(reads, plan, 1)
    assert len(reads.take(first, plan(first))) == 1
    reads_ahead(reads, plan, 1)
    assert reads.take(second, plan(second))[0].chunk == plan(second).chunks[0]
    assert not reads.next_read(plan, begin)


def test_a_wrong_guess_gives_nothing_but_what_is_to_be_dropped(
    made: tuple[list[Block], list[Registry]], plan: Callable[[Block], ReadPlan]
) -> None:
    first, second, third = made[0]
    reads = SpeculativeReads()
    reads.expect([first, second])
    reads_ahead(reads, plan, 3)
    assert reads.take(third, plan(third)) == []
    assert len(reads.drop()) == 3
    assert reads.drop() == []


def test_reads_from_before_a_write_are_not_used(
    made: tuple[list[Block], list[Registry]], plan: Callable[[Block], ReadPlan]
) -> None:
    (first, *_), (registry, *_) = made
    reads = SpeculativeReads()
    reads.expect([first])
    reads_ahead(reads, plan, 1)
    registry["weight"].data[5] = 9
    assert reads.take(first, plan(first)) == []


def test_failed_speculative_reads_are_made_again(
    made: tuple[list[Block], list[Registry]], plan: Callable[[Block], ReadPlan]
) -> None:
    first = made[0][0]
    reads = SpeculativeReads()
    reads.expect([first])

    def fail(chunk: Chunk) -> Read:
        read = begin(chunk)
        read.staged = Future()
        read.staged.set_exception(OSError("the disk is gone"))
        return read

    assert reads.next_read(plan, fail)
    assert reads.take(first, plan(first)) == []


def test_blocks_of_which_nothing_is_read_are_passed_over(
    made: tuple[list[Block], list[Registry]], plan: Callable[[Block], ReadPlan]
) -> None:
    (first, second, _), (registry, *_) = made
    registry["weight"].data[5] = 9
    reads = SpeculativeReads()
    reads.expect([first, second])
    reads_ahead(reads, plan, 1)
    assert reads.take(first, plan(first)) == []
    assert len(reads.take(second, plan(second))) == 1
