"""From disk to a device: readers, staging slots and the copy stream at work at once."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.checkpoint import Checkpoint
from bigmodel.devices import Event, copy_stream
from bigmodel.devices.streams import ThreadCopyStream
from bigmodel.dispatch.transfer.disk_reader import DiskReader
from bigmodel.dispatch.transfer.files import SourceFile
from bigmodel.dispatch.transfer.page_cache import ReadMode, ReadPolicy
from bigmodel.dispatch.transfer.quantized_transfer import Transfer
from bigmodel.dispatch.weights.block import Block, HostTensor
from bigmodel.dispatch.weights.visits import StreamStats
from bigmodel.errors import CheckpointFormatError
from bigmodel.plan import StagingMemory

from ..mapped_files import streamed_blocks

HOST = torch.device("cpu")
CHUNK = 8192
SLOTS = 6
STAGING = StagingMemory(CHUNK, SLOTS)


class GatedStream:
    """A copy stream that copies nothing until its gate is opened, and counts what has been copied."""

    def __init__(self) -> None:
        self._stream = copy_stream(HOST)
        self.gate = threading.Event()
        self.copied = 0

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        def gated() -> None:
            assert self.gate.wait(30)
            work()
            self.copied += 1

        return self._stream.submit(gated, after)

    def compute_mark(self) -> Event:
        return self._stream.compute_mark()


@pytest.fixture
def stats() -> StreamStats:
    return StreamStats()


@pytest.fixture
def reader(stats: StreamStats) -> DiskReader:
    return DiskReader(copy_stream(HOST), ReadPolicy(0), stats, STAGING)


def memory_for(block: Block) -> torch.Tensor:
    return torch.zeros(block.layout.nbytes, dtype=torch.uint8)


def fetched(reader: DiskReader, block: Block) -> list[torch.Tensor]:
    memory = memory_for(block)
    reader.fetch(Transfer(block, memory), ()).wait()
    return block.layout.views(memory)


def block_of(path: Path, dtype: torch.dtype | None = None) -> Block:
    """Return all tensors of a file as one block, in the reverse of their order in the file."""
    checkpoint = Checkpoint.open(path)
    values = [checkpoint.tensor(name) for name in sorted(checkpoint, reverse=True)]
    return Block("all", [HostTensor(value, dtype or value.dtype) for value in values])


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A file of tensors of many sizes: smaller and larger than a chunk, starting at any byte."""
    torch.manual_seed(0)
    path = tmp_path / "mixed.safetensors"
    tensors = {f"{n:02}": torch.randn(size) for n, size in enumerate([5, 3000, 1, 2048, 7000, 12, 20_000])}
    tensors["bytes"] = torch.arange(251, dtype=torch.uint8).repeat(100)
    tensors["scalar"] = torch.tensor(3, dtype=torch.int64)
    save_file(tensors, path)
    return path


def test_every_bit_arrives(reader: DiskReader, mixed: Path, stats: StreamStats) -> None:
    block = block_of(mixed)
    for tensor, arrived in zip(block.tensors, fetched(reader, block)):
        assert torch.equal(arrived, tensor.value)
    assert stats.bytes_from_disk == block.nbytes
    assert stats.bytes_from_ram == 0
    assert stats.seconds_reading > 0


def test_weights_cast_on_the_way_arrive_cast(reader: DiskReader, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file({"a": torch.randn(7001), "b": torch.randn(3)}, tmp_path / "float.safetensors")
    block = block_of(tmp_path / "float.safetensors", torch.bfloat16)
    for tensor, arrived in zip(block.tensors, fetched(reader, block)):
        assert torch.equal(arrived, tensor.value.bfloat16())


def test_reads_past_the_page_cache_give_the_same_bits(
    reader: DiskReader, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadPolicy, "mode", lambda self, cached, offset: ReadMode.DIRECT)
    block = block_of(mixed)
    for tensor, arrived in zip(block.tensors, fetched(reader, block)):
        assert torch.equal(arrived, tensor.value)


def test_reading_goes_on_while_the_link_is_busy_and_no_further_than_there_are_slots(
    tmp_path: Path, stats: StreamStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=3, elements=8 * CHUNK // 4)
    stream = GatedStream()
    reader = DiskReader(stream, ReadPolicy(0), stats, STAGING)
    reads = threading.Semaphore(0)
    count = 0
    read = SourceFile.read

    def counted(self: SourceFile, memory: memoryview, offset: int, needed: int, bypass: bool = False) -> None:
        nonlocal count
        read(self, memory, offset, needed, bypass)
        count += 1
        reads.release()

    monkeypatch.setattr(SourceFile, "read", counted)
    memorys = [memory_for(block) for block in blocks]
    arrivals = [reader.fetch(Transfer(block, memory), ()) for block, memory in zip(blocks, memorys)]
    for _ in range(SLOTS):
        assert reads.acquire(timeout=30)
    assert (stream.copied, count) == (0, SLOTS), "all slots are filled before the first copy has ended"
    assert not any(arrival.done() for arrival in arrivals)
    stream.gate.set()
    for block, memory, arrival in zip(blocks, memorys, arrivals):
        arrival.synchronize()
        assert arrival.done()
        assert torch.equal(block.layout.views(memory)[0], block.tensors[0].value)


def test_chunks_that_are_staged_together_are_copied_in_one_submission(
    tmp_path: Path, stats: StreamStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=1, elements=(SLOTS * CHUNK - CHUNK // 2) // 4)
    stream, all_read = copy_stream(HOST), threading.Event()
    submit, read, left, submissions = stream.submit, SourceFile.read, SLOTS, 0

    def counted(self: SourceFile, memory: memoryview, offset: int, needed: int, bypass: bool = False) -> None:
        nonlocal left
        read(self, memory, offset, needed, bypass)
        left -= 1
        if not left:
            all_read.set()

    def after_all_reads(work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        nonlocal submissions
        submissions += 1
        assert all_read.wait(30)
        return submit(work, after, nbytes)

    monkeypatch.setattr(SourceFile, "read", counted)
    monkeypatch.setattr(stream, "submit", after_all_reads)
    reader = DiskReader(stream, ReadPolicy(0), stats, STAGING, readers=1)
    assert fetched(reader, blocks[0])[0].unique().tolist() == [0]
    assert submissions <= 3, "one for what was read first, and one or two for the other five"


def test_expected_blocks_wait_in_free_slots_until_they_are_fetched(
    tmp_path: Path, stats: StreamStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=3, elements=CHUNK // 8)
    reader = DiskReader(copy_stream(HOST), ReadPolicy(0), stats, STAGING)
    reads = threading.Semaphore(0)
    read = SourceFile.read

    def counted(self: SourceFile, memory: memoryview, offset: int, needed: int, bypass: bool = False) -> None:
        read(self, memory, offset, needed, bypass)
        reads.release()

    monkeypatch.setattr(SourceFile, "read", counted)
    reader.expect(blocks[1:])
    assert fetched(reader, blocks[0])[0].unique().tolist() == [0]
    for _ in blocks:
        assert reads.acquire(timeout=30)
    reader.expect(())
    for n, block in enumerate(blocks[1:], 1):
        assert fetched(reader, block)[0].unique().tolist() == [n]
    assert not reads.acquire(blocking=False), "each was read once"
    assert stats.bytes_from_disk == sum(block.nbytes for block in blocks)


@pytest.mark.parametrize("order", [[2, 1, 0, 3], [3, 3, 0, 1], [0, 1, 2, 3]])
def test_a_wrong_expectation_costs_time_and_nothing_else(reader: DiskReader, tmp_path: Path, order: list[int]) -> None:
    blocks, registries = streamed_blocks(tmp_path, count=4, elements=5 * CHUNK)
    for _ in range(3):
        for n in order:
            reader.expect([blocks[1], blocks[2], blocks[3]])
            assert fetched(reader, blocks[n])[0].unique().tolist() == [n]
    reader.expect([blocks[1]])
    fetched(reader, blocks[0])
    registries[1]["weight"].data.fill_(7)
    assert fetched(reader, blocks[1])[0].unique().tolist() == [7], "what was read ahead is out of date"


@pytest.mark.slow
def test_a_read_of_a_wrong_expectation_that_is_still_running_writes_over_no_later_one(
    tmp_path: Path, stats: StreamStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=3, elements=3 * CHUNK // 4)
    start = (tmp_path / "model.safetensors").stat().st_size - 2 * blocks[1].nbytes
    stream = GatedStream()
    reader = DiskReader(stream, ReadPolicy(0), stats, STAGING)
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    later_reads = threading.Semaphore(0)
    read = SourceFile.read

    def slow_once(self: SourceFile, memory: memoryview, offset: int, needed: int, bypass: bool = False) -> None:
        is_first = offset >= start and not begun.is_set()
        if is_first:
            begun.set()
            assert goes_on.wait(30)
        read(self, memory, offset, needed, bypass)
        if is_first:
            ended.set()
        elif offset >= start + blocks[1].nbytes:
            later_reads.release()

    monkeypatch.setattr(SourceFile, "read", slow_once)
    stream.gate.set()
    reader.expect([blocks[1]])
    fetched(reader, blocks[0])
    assert begun.wait(30)
    stream.gate.clear()
    reader.expect(())
    memory = memory_for(blocks[2])
    arrival = reader.fetch(Transfer(blocks[2], memory), ())
    for _ in range(3):  # they come only if the slot of the running read is taken for free
        later_reads.acquire(timeout=0.1)
    goes_on.set()
    assert ended.wait(30)
    stream.gate.set()
    arrival.wait()
    assert blocks[2].layout.views(memory)[0].unique().tolist() == [2]


def test_a_file_cut_short_is_reported_where_the_block_is_needed(reader: DiskReader, tmp_path: Path) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=3, elements=CHUNK)
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - CHUNK)
    arrivals = [reader.fetch(Transfer(block, memory_for(block)), ()) for block in blocks]
    arrivals[0].wait()
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors.*cut short"):
        arrivals[2].wait()
    arrivals[1].wait()
    assert fetched(reader, blocks[1])[0].unique().tolist() == [1]


def test_a_read_error_names_the_file_and_the_next_fetch_tries_again(
    reader: DiskReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=1, elements=CHUNK)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, "preadv", broken)
        with pytest.raises(OSError, match=r"Input/output error.*model\.safetensors"):
            fetched(reader, blocks[0])
    assert fetched(reader, blocks[0])[0].unique().tolist() == [0]


def test_weights_written_since_come_from_memory(reader: DiskReader, tmp_path: Path, stats: StreamStats) -> None:
    blocks, registries = streamed_blocks(tmp_path, count=2, elements=CHUNK)
    registries[1]["weight"].data[5] = 9  # no version counter sees this
    arrived = fetched(reader, blocks[1])[0]
    assert arrived[:7].tolist() == [1, 1, 1, 1, 1, 9, 1]
    assert (stats.bytes_from_ram, stats.bytes_from_disk) == (blocks[1].nbytes, 0)


def test_the_mapped_bytes_count_when_another_file_takes_the_name(reader: DiskReader, tmp_path: Path) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=1, elements=CHUNK)
    other = tmp_path / "other"
    other.write_bytes(b"\xff" * 10 * CHUNK)
    other.replace(tmp_path / "model.safetensors")
    assert fetched(reader, blocks[0])[0].unique().tolist() == [0]


def test_the_later_of_two_fetches_into_one_memory_counts(tmp_path: Path, stats: StreamStats) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=3, elements=4 * CHUNK)
    stream = GatedStream()
    reader = DiskReader(stream, ReadPolicy(0), stats, STAGING)
    memory = memory_for(blocks[0])
    for block in blocks[:-1]:
        reader.fetch(Transfer(block, memory), ())
    last = reader.fetch(Transfer(blocks[-1], memory), ())
    stream.gate.set()
    last.wait()
    assert blocks[-1].layout.views(memory)[0].unique().tolist() == [2]


def test_a_copy_that_fails_is_reported_and_frees_its_slots(reader: DiskReader, tmp_path: Path) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=1, elements=8 * CHUNK)
    too_small = torch.zeros(16, dtype=torch.uint8)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="size"):
            reader.fetch(Transfer(blocks[0], too_small), ()).wait()
    assert fetched(reader, blocks[0])[0].unique().tolist() == [0]


def descriptors_of(folder: Path) -> int:
    """Return how many descriptors of files in `folder` this process has."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.lexists(link))


def test_files_are_opened_once_and_closed_with_the_reader(tmp_path: Path, stats: StreamStats) -> None:
    blocks, _ = streamed_blocks(tmp_path, count=4, elements=CHUNK)
    before = descriptors_of(tmp_path)
    link = ThreadCopyStream("to the host")
    reader = DiskReader(link, ReadPolicy(0), stats, STAGING)
    fetched(reader, blocks[0])
    opened = descriptors_of(tmp_path)
    for _ in range(3):
        for block in blocks:
            fetched(reader, block)
    assert before < descriptors_of(tmp_path) == opened
    executors = reader._pump_thread, reader._readers, link._worker  # other tests' readers may have threads, too
    threads = [thread for executor in executors for thread in executor._threads]
    assert threads
    del reader, link, executors
    gc.collect()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    gc.collect()
    assert descriptors_of(tmp_path) == before
