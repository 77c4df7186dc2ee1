"""Read-ahead of mapped weights that the host computes with: paged in before use, dropped after it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.checkpoint import populate
from bigmodel.dispatch.mapped import page_in, readahead, residency
from bigmodel.dispatch.mapped import page_in as page_watch
from bigmodel.dispatch.mapped.mapped_block import MappedBlock
from bigmodel.dispatch.mapped.readahead import ReadAhead
from bigmodel.errors import CheckpointError, CheckpointFormatError
from bigmodel.plan import read_ahead_window

from ..mapped_files import mapped_blocks

MIB = 2**20


class Populated:
    """Stands in for the kernel's populating: records what is paged in, and can block it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        self.gates: dict[int, threading.Event] = {}
        self.failures: dict[int, Exception] = {}
        self.begun = threading.Condition()
        monkeypatch.setattr(page_in, "populate", self)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        number = int(tensors[0].view(torch.float32)[0])
        with self.begun:
            self.seen.append(number)
            self.begun.notify_all()
        if number in self.gates:
            assert self.gates[number].wait(30)
        if number in self.failures:
            raise self.failures.pop(number)
        populate(tensors)

    def wait_for(self, number: int) -> None:
        with self.begun:
            assert self.begun.wait_for(lambda: number in self.seen, 30), f"{number} was not paged in: {self.seen}"


@pytest.fixture
def populated(monkeypatch: pytest.MonkeyPatch) -> Populated:
    return Populated(monkeypatch)


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no other process takes and pages that are never taken away."""
    monkeypatch.setattr(residency, "page_cache_bytes", lambda used: 2**40)
    monkeypatch.setattr(page_watch, "major_faults", lambda: 0)


@pytest.fixture(autouse=True)
def looking_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry checks for reclaimed pages."""
    monkeypatch.setattr(page_watch, "LOOK_SECONDS", 0.0)


_submitted: list[Future[Any]] = []


class ObservedPool(ThreadPoolExecutor):
    """A thread pool whose work the tests can wait for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        _submitted.append(super().submit(fn, *args, **kwargs))
        return _submitted[-1]


@pytest.fixture(autouse=True)
def observed_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Observe the readers of every test, and end their work before the next test begins."""
    monkeypatch.setattr(readahead, "ThreadPoolExecutor", ObservedPool)
    yield
    wait_until_idle()


def visit(reader: ReadAhead, block: MappedBlock) -> bool:
    with reader.use(block) as held:
        return bool(held)


def wait_until_idle() -> None:
    """Wait until no reader is paging anything in."""
    done, not_done = wait(_submitted, timeout=30)
    assert not not_done
    _submitted.clear()
    for work in done:
        work.result()


@pytest.mark.usefixtures("unlimited")
def test_an_entered_block_is_in_memory_and_the_next_is_being_paged_in(tmp_path: Path, populated: Populated) -> None:
    blocks, _ = mapped_blocks(tmp_path, 3)
    reader = ReadAhead(blocks, readers=1)
    populated.gates[1] = threading.Event()
    with reader.use(blocks[0]):
        populated.wait_for(1)
        assert populated.seen == [0, 1]
        assert (blocks[0].is_ready, blocks[1].is_ready) == (True, False)
        populated.gates[1].set()
    visit(reader, blocks[1])
    assert blocks[1].is_ready
    assert (reader.stats.misses, reader.stats.hits) == (1, 1)


@pytest.mark.usefixtures("unlimited")
def test_entering_a_block_pages_nothing_in_once_all_blocks_are_in_memory(tmp_path: Path, populated: Populated) -> None:
    blocks, _ = mapped_blocks(tmp_path, 4)
    reader = ReadAhead(blocks, readers=1)
    visit(reader, blocks[0])
    wait_until_idle()
    assert populated.seen == [0, 1, 2, 3]
    for _ in range(3):
        assert [visit(reader, block) for block in blocks] == [False] * 4
    assert len(populated.seen) == 4


@pytest.mark.usefixtures("unlimited")
def test_a_second_reader_pages_in_later_blocks_while_the_first_waits_for_the_disk(
    tmp_path: Path, populated: Populated
) -> None:
    blocks, _ = mapped_blocks(tmp_path, 4)
    reader = ReadAhead(blocks)
    populated.gates[1] = threading.Event()
    visit(reader, blocks[0])
    populated.wait_for(3)
    assert not blocks[1].is_ready
    populated.gates[1].set()
    wait_until_idle()
    assert sorted(populated.seen) == [0, 1, 2, 3]
    assert [visit(reader, block) for block in blocks] == [False] * 4


def test_pages_that_the_kernel_reclaimed_are_paged_in_again(
    tmp_path: Path, populated: Populated, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = 0
    monkeypatch.setattr(page_watch, "major_faults", lambda: faults)
    blocks, _ = mapped_blocks(tmp_path, 3)
    reader = ReadAhead(blocks, readers=1)
    visit(reader, blocks[0])
    wait_until_idle()
    faults = 1
    assert visit(reader, blocks[1])
    wait_until_idle()
    assert populated.seen == [0, 1, 2, 1, 2, 0]


def test_lost_pages_are_checked_for_only_once_per_interval(
    tmp_path: Path, populated: Populated, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, now = 0, 0.0
    monkeypatch.setattr(page_watch, "major_faults", lambda: faults)
    monkeypatch.setattr(page_watch.time, "monotonic", lambda: now)
    monkeypatch.setattr(page_watch, "LOOK_SECONDS", 1.0)
    blocks, _ = mapped_blocks(tmp_path, 3)
    reader = ReadAhead(blocks)
    visit(reader, blocks[0])
    wait_until_idle()
    assert not visit(reader, blocks[1])
    faults, now = 1, 0.9
    assert not visit(reader, blocks[2])
    now = 1.0
    assert visit(reader, blocks[0])


def test_the_visit_order_is_learned(tmp_path: Path, populated: Populated, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = 0
    monkeypatch.setattr(page_watch, "major_faults", lambda: faults)
    blocks, _ = mapped_blocks(tmp_path, 4)
    reader = ReadAhead(blocks, readers=1)
    for n in (0, 3, 1, 2, 0):
        visit(reader, blocks[n])
    wait_until_idle()
    populated.seen.clear()
    faults = 1
    visit(reader, blocks[0])
    wait_until_idle()
    assert populated.seen == [0, 3, 1, 2]


def under_budget(blocks: list[MappedBlock], budget: int, monkeypatch: pytest.MonkeyPatch) -> ReadAhead:
    """Return a reader for a process that holds nothing but its blocks."""
    monkeypatch.setattr(residency, "resident_bytes", lambda: sum(block.paged_in for block in blocks))
    return ReadAhead(blocks, budget)


@pytest.mark.slow
def test_the_budget_holds_and_most_blocks_that_fit_stay(
    tmp_path: Path, populated: Populated, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, registries = mapped_blocks(tmp_path, 8)
    reader = under_budget(blocks, 5 * MIB + MIB // 8, monkeypatch)
    turns = 5
    for turn in range(turns):
        for n, block in enumerate(blocks):
            with reader.use(block) as held:
                assert held
                assert sum(block.paged_in for block in blocks) <= 5 * MIB
                assert registries[n]["weight"].unique().tolist() == [n]
        if turn == 0:
            wait_until_idle()
            populated.seen.clear()
    wait_until_idle()
    # Of 8 blocks 3 stay beside two blocks' room to work in. Least recently used first, each turn would bring in all 8.
    # How far reading had come between two turns is chance, and counts on either side.
    assert len(populated.seen) <= (turns - 1) * 5 + 2
    assert reader.stats.bytes_dropped >= 3 * 3 * MIB


def test_a_block_larger_than_the_budget_is_paged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, registries = mapped_blocks(tmp_path, 3)
    reader = under_budget(blocks, MIB // 4, monkeypatch)
    for n, block in enumerate(blocks):
        with reader.use(block) as held:
            assert held
            assert sum(block.paged_in for block in blocks) <= read_ahead_window([MIB] * 3)
            assert registries[n]["weight"][-1] == n


def test_weights_that_were_written_are_never_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, registries = mapped_blocks(tmp_path, 6)
    reader = under_budget(blocks, 2 * MIB, monkeypatch)
    visit(reader, blocks[2])
    registries[2]["weight"].data[17] = -1.0  # no version counter sees this
    for _ in range(3):
        for block in blocks:
            visit(reader, block)
    assert registries[2]["weight"][17] == -1
    assert registries[2]["weight"][18] == 2


def test_nothing_is_dropped_while_no_forward_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that writes weights between forwards must not meet a thread that is letting go of them."""
    blocks, _ = mapped_blocks(tmp_path, 6)
    reader = under_budget(blocks, 2 * MIB, monkeypatch)
    during: list[bool] = []
    visiting = False

    def watched(self: MappedBlock, nbytes: int | None = None, evict: bool = False) -> int:
        during.append(visiting)
        self.forget()
        return self.nbytes

    monkeypatch.setattr(MappedBlock, "drop", watched)
    for _ in range(3):
        for block in blocks:
            visiting = True
            visit(reader, block)
            visiting = False
    assert during
    assert all(during)


@pytest.mark.usefixtures("unlimited")
def test_a_truncated_file_raises_and_does_not_kill_the_process(tmp_path: Path) -> None:
    blocks, registries = mapped_blocks(tmp_path, 3)
    reader = ReadAhead(blocks)
    visit(reader, blocks[0])
    wait_until_idle()
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - MIB)
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors.*cut short"):
        visit(reader, blocks[2])
    visit(reader, blocks[1])
    assert registries[1]["weight"][-1] == 1


@pytest.mark.usefixtures("unlimited")
def test_a_read_error_is_raised_where_the_block_is_needed_and_read_again_the_next_time(
    tmp_path: Path, populated: Populated
) -> None:
    blocks, registries = mapped_blocks(tmp_path, 3)
    reader = ReadAhead(blocks)
    populated.failures[1] = CheckpointError("Input/output error")
    visit(reader, blocks[0])
    wait_until_idle()
    populated.failures[1] = CheckpointError("Input/output error")
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors.*'1'.*Input/output"):
        visit(reader, blocks[1])
    visit(reader, blocks[1])
    assert registries[1]["weight"][-1] == 1


@pytest.mark.usefixtures("unlimited")
def test_a_weight_that_replaced_a_mapped_one_is_not_paged_in(tmp_path: Path, populated: Populated) -> None:
    blocks, registries = mapped_blocks(tmp_path, 3)
    reader = ReadAhead(blocks)
    registries[1]["weight"] = torch.ones(3)
    for block in blocks:
        visit(reader, block)
    wait_until_idle()
    assert 1 not in populated.seen
    assert registries[1]["weight"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_threads_share_a_reader_under_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, registries = mapped_blocks(tmp_path, 6, elements=2**14)
    reader = under_budget(blocks, 3 * 2**16, monkeypatch)
    wrong: list[object] = []

    def walk(start: int) -> None:
        for step in range(100):
            n = (start + step) % 6
            with reader.use(blocks[n]):
                if registries[n]["weight"].unique().tolist() != [n]:
                    wrong.append(n)

    threads = [threading.Thread(target=walk, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "threads wait for each other for ever"
    assert wrong == []


def test_reader_threads_end_with_their_reader(tmp_path: Path) -> None:
    blocks, _ = mapped_blocks(tmp_path, 2)
    before = set(threading.enumerate())
    reader = ReadAhead(blocks)
    visit(reader, blocks[0])
    wait_until_idle()
    made = {thread for thread in threading.enumerate() if thread.name.startswith("read ahead")} - before
    assert made
    del reader
    gc.collect()
    for thread in made:
        thread.join(timeout=60)
        assert not thread.is_alive()
