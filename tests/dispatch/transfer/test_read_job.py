"""A block on its way from disk to a device, step by step and without the threads that take the steps."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest
import torch

from bigmodel.devices.streams import PastEvent
from bigmodel.dispatch.transfer.files import SourceFiles
from bigmodel.dispatch.transfer.page_cache import ReadMode
from bigmodel.dispatch.transfer.quantized_transfer import Transfer
from bigmodel.dispatch.transfer.read_job import Read, ReadEvent, ReadJob, Stage, copy_staged
from bigmodel.dispatch.transfer.read_plan import Chunk, ReadPlan, plan_reads
from bigmodel.dispatch.transfer.staging import StagingSlot, StagingSlots
from bigmodel.dispatch.weights.block import Block, HostTensor
from bigmodel.plan import StagingMemory

from ..mapped_files import checkpoint_file, registries

CHUNK = 8192
ELEMENTS = 3000


class Waiting(PastEvent):
    """An event that has not come yet, and notes that it was waited for."""

    waited = False

    def done(self) -> bool:
        return self.waited

    def wait(self) -> None:
        self.waited = True

    synchronize = wait


@pytest.fixture
def files() -> SourceFiles:
    return SourceFiles()


def block_of(folder: Path, dtype: torch.dtype = torch.float32) -> Block:
    """Return a block of two tensors in a file, full of 0 and of 1, and one in memory, full of 2."""
    owners = registries(checkpoint_file(folder, 2, ELEMENTS))
    owners.append({"weight": torch.full((5,), 2.0)})
    return Block("block", [HostTensor(owner["weight"], dtype, [(owner, "weight")]) for owner in owners])


def job_of(block: Block) -> ReadJob:
    return ReadJob(Transfer(block, torch.empty(block.layout.nbytes, dtype=torch.uint8)), ())


def opened(block: Block, files: SourceFiles) -> tuple[ReadJob, ReadPlan]:
    job, reads = job_of(block), plan_reads(block, files, CHUNK)
    job.open(reads)
    return job, reads


def slot() -> StagingSlot:
    return StagingSlots(StagingMemory(CHUNK, 6), pin=False).free[0]


def staged(chunk: Chunk) -> Read:
    """Return a read that has ended well."""
    lent, bytes_of_it = slot(), Future[torch.Tensor]()
    bytes_of_it.set_result(lent.fill(chunk, ReadMode.KEEP))
    return Read(chunk, lent, bytes_of_it)


def copy_all(job: ReadJob, reads: ReadPlan) -> None:
    stages = [*([Stage(job)] if job.has_own_stage else []), *(Stage(job, staged(chunk)) for chunk in reads.chunks)]
    assert all(stage.is_staged for stage in stages)
    copy_staged(stages, [copy for stage in stages for copy in stage.copies()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_stages_together_bring_the_whole_block_cast_or_not(
    tmp_path: Path, files: SourceFiles, dtype: torch.dtype
) -> None:
    block = block_of(tmp_path, dtype)
    job, reads = opened(block, files)
    assert len(reads.chunks) > 1
    assert reads.from_memory == (2,)
    copy_all(job, reads)
    assert job.failure is None
    views = block.layout.views(job.memory)
    assert [view.dtype for view in views] == [dtype] * 3
    assert [view.unique().tolist() for view in views] == [[0.0], [1.0], [2.0]]


def test_a_block_that_lies_in_memory_after_all_is_copied_from_there_alone(files: SourceFiles) -> None:
    registry = {"weight": torch.arange(5.0)}
    block = Block("block", [HostTensor(registry["weight"], torch.float32, [(registry, "weight")])])
    job, reads = opened(block, files)
    assert (len(reads.chunks), job.left, job.is_read) == (0, 1, True)
    copy_all(job, reads)
    assert block.layout.views(job.memory)[0].tolist() == [0, 1, 2, 3, 4]


def test_a_job_is_read_when_no_chunk_is_left_to_begin_with(tmp_path: Path, files: SourceFiles) -> None:
    block = block_of(tmp_path)
    job = job_of(block)
    assert not job.is_read, "how it is read is not known yet"
    job.open(plan_reads(block, files, CHUNK))
    assert job.chunks is not None
    assert job.left == 1 + len(job.chunks)
    while job.chunks:
        assert not job.is_read
        job.chunks.popleft()
    assert job.is_read


def test_only_its_first_copy_waits_for_what_must_be_done_before(tmp_path: Path) -> None:
    block, event = block_of(tmp_path), Waiting()
    job = ReadJob(Transfer(block, torch.empty(block.layout.nbytes, dtype=torch.uint8)), [event])
    assert list(job.before()) == [event]
    assert list(job.before()) == []


@pytest.mark.parametrize("outcome", [PastEvent(), OSError("the disk is gone"), CancelledError()])
def test_how_it_ended_is_said_once(tmp_path: Path, outcome: PastEvent | BaseException) -> None:
    job = job_of(block_of(tmp_path))
    read = ReadEvent(job)
    assert not read.done()
    job.set_outcome(outcome)
    job.set_outcome(OSError("too late"))
    assert job.is_read
    assert read.done()
    if isinstance(outcome, BaseException):
        for wait in (read.wait, read.synchronize):
            with pytest.raises(type(outcome)) as raised:
                wait()
            assert raised.value is outcome
    else:
        read.wait()
        read.synchronize()


def test_a_block_has_arrived_when_its_last_copy_has(tmp_path: Path) -> None:
    job, last = job_of(block_of(tmp_path)), Waiting()
    read = ReadEvent(job)
    job.set_outcome(last)
    assert not read.done()
    read.wait()
    assert last.waited
    assert read.done()


def test_errors_of_a_copy_are_raised_in_the_waiter(
    tmp_path: Path, files: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, reads = opened(block_of(tmp_path), files)
    stage = Stage(job, staged(reads.chunks[0]))
    error = OSError("cut short")

    def fail(self: StagingSlot) -> None:
        raise error

    monkeypatch.setattr(StagingSlot, "check", fail)
    copy_staged([stage], stage.copies())
    job.set_outcome(PastEvent())
    for wait in (ReadEvent(job).wait, ReadEvent(job).synchronize):
        with pytest.raises(OSError, match="cut short"):
            wait()


def test_errors_of_reading_are_raised_by_the_stage(tmp_path: Path, files: SourceFiles) -> None:
    job, reads = opened(block_of(tmp_path), files)
    failed = Future[torch.Tensor]()
    stage = Stage(job, Read(reads.chunks[0], slot(), failed))
    failed.set_exception(OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        stage.copies()


def test_a_read_has_failed_when_it_raised_or_was_given_up(tmp_path: Path, files: SourceFiles) -> None:
    _, reads = opened(block_of(tmp_path), files)
    chunk = reads.chunks[0]
    under_way, raised, given_up = (Read(chunk, slot(), Future[torch.Tensor]()) for _ in range(3))
    raised.staged.set_exception(OSError("the disk is gone"))
    given_up.staged.cancel()
    found = [read.has_failed for read in (under_way, staged(chunk), raised, given_up)]
    assert found == [False, False, True, True]
