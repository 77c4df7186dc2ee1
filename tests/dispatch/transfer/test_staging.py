"""Where chunks of files wait on the host: read into memory of a slot's own, or shown where the page cache has them."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.benchmarks.harness.pagecache import evict
from bigmodel.checkpoint import Checkpoint
from bigmodel.devices import virtual
from bigmodel.devices.streams import HostEvent
from bigmodel.dispatch.transfer import staging as staging_slots
from bigmodel.dispatch.transfer.files import SourceFile, SourceFiles
from bigmodel.dispatch.transfer.page_cache import ReadMode, is_page_cached
from bigmodel.dispatch.transfer.read_plan import Chunk, plan_reads
from bigmodel.dispatch.transfer.staging import StagingSlots
from bigmodel.dispatch.weights.block import Block, HostTensor
from bigmodel.errors import CheckpointFormatError
from bigmodel.limits import STAGING_BYTES
from bigmodel.plan import StagingMemory, staging_memory

CHUNK = 2**16
SLOTS = StagingMemory(CHUNK, 6)


@pytest.fixture
def chunks(tmp_path: Path) -> list[Chunk]:
    """The chunks of a file whose bytes count up."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(4 * CHUNK).to(torch.uint8)}, path)
    weight = Checkpoint.open(path).tensor("weight")
    block = Block("block", [HostTensor(weight, weight.dtype)])
    return list(plan_reads(block, SourceFiles(), CHUNK).chunks)


@pytest.fixture
def every_chunk_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_slots, "VIEW_BYTES", 0)


def weight_bytes(chunk: Chunk, staged: torch.Tensor) -> list[int]:
    piece = chunk.segments[0]
    return staged[piece.offset : piece.offset + piece.nbytes].tolist()


@pytest.mark.parametrize("shown", [0, 2**40])
@pytest.mark.parametrize("mode", ReadMode)
def test_a_chunk_is_staged_bit_by_bit_each_way(
    chunks: list[Chunk], shown: int, mode: ReadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_slots, "VIEW_BYTES", shown)
    slots = StagingSlots(SLOTS, pin=False).free
    for chunk, slot in zip(chunks, slots):
        start = chunk.segments[0].start
        expected = [n % 256 for n in range(start, start + chunk.segments[0].nbytes)]
        assert weight_bytes(chunk, slot.fill(chunk, mode)) == expected
        slot.check()
        slot.empty()


def test_a_large_chunk_is_shown_where_it_lies_and_nothing_is_copied(
    chunks: list[Chunk], every_chunk_is_shown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SourceFile, "read")
    slot = StagingSlots(SLOTS, pin=False).free[0]
    assert slot.fill(chunks[0], ReadMode.KEEP).nbytes == chunks[0].nbytes


@pytest.mark.parametrize("shown", [0, 2**40])
@pytest.mark.parametrize(("mode", "kept"), [(ReadMode.KEEP, True), (ReadMode.PASS, False), (ReadMode.DIRECT, False)])
def test_the_page_cache_keeps_the_bytes_of_a_drained_chunk_or_none_of_them(
    chunks: list[Chunk], shown: int, mode: ReadMode, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_slots, "VIEW_BYTES", shown)
    evict([tmp_path / "model.safetensors"])
    chunk, slot = chunks[1], StagingSlots(SLOTS, pin=False).free[0]
    slot.fill(chunk, mode)
    slot.empty()
    weight = Checkpoint.open(tmp_path / "model.safetensors").tensor("weight")
    assert is_page_cached(weight.data_ptr() + chunk.segments[0].start + CHUNK // 2) is kept


def test_bytes_that_cannot_be_mapped_are_read_and_the_error_names_the_cause(
    chunks: list[Chunk], every_chunk_is_shown: None, tmp_path: Path
) -> None:
    os.truncate(tmp_path / "model.safetensors", 3 * CHUNK)
    slot = StagingSlots(SLOTS, pin=False).free[0]
    with pytest.raises(CheckpointFormatError, match="cut short"):
        slot.fill(chunks[-1], ReadMode.KEEP)


def test_mapped_bytes_are_not_touched_once_their_file_was_cut_short(
    chunks: list[Chunk], every_chunk_is_shown: None, tmp_path: Path
) -> None:
    slot = StagingSlots(SLOTS, pin=False).free[0]
    slot.fill(chunks[-1], ReadMode.KEEP)
    os.truncate(tmp_path / "model.safetensors", 3 * CHUNK)
    with pytest.raises(CheckpointFormatError, match="cut short"):
        slot.check()
    slot.empty()
    slot.check()


def test_mapped_bytes_are_lost_once_the_page_cache_has_dropped_them(
    chunks: list[Chunk], every_chunk_is_shown: None, tmp_path: Path
) -> None:
    slot = StagingSlots(SLOTS, pin=False).free[0]
    slot.fill(chunks[0], ReadMode.KEEP)
    assert not slot.is_lost
    evict([tmp_path / "model.safetensors"])
    assert slot.is_lost
    slot.empty()
    assert not slot.is_lost


def test_a_slot_is_emptied_only_after_its_content_was_copied(chunks: list[Chunk]) -> None:
    copied: Future[None] = Future()
    slot = StagingSlots(SLOTS, pin=False).free[0]
    slot.drained = HostEvent(copied)
    copied.set_exception(RuntimeError("the copy"))
    with pytest.raises(RuntimeError, match="the copy"):
        slot.empty()


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("planned", [staging_memory([10**7]), staging_memory([STAGING_BYTES] * 2)])
def test_pinned_slots_take_what_is_planned(planned: StagingMemory) -> None:
    before = virtual.pinned_memory.reserved
    slots = StagingSlots(planned, pin=True)
    kept = [slot._memory.part(number) for number, slot in enumerate(slots.free)]
    assert virtual.pinned_memory.reserved - before == planned.nbytes
    del kept
