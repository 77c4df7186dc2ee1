"""Page-in of mapped blocks, and the watch for pages that the kernel evicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bigmodel.dispatch.mapped import page_in as module
from bigmodel.dispatch.mapped import page_in as page_watch
from bigmodel.dispatch.mapped.mapped_block import MappedBlock
from bigmodel.dispatch.mapped.page_in import PageWatch, page_in
from bigmodel.dispatch.transfer.page_cache import seems_cached
from bigmodel.dispatch.weights.visits import StreamStats
from bigmodel.errors import CheckpointError, CheckpointFormatError

from ..mapped_files import Registry, mapped_blocks

STEP = 2**20


@pytest.fixture
def made(tmp_path: Path) -> tuple[MappedBlock, Registry]:
    blocks, registries = mapped_blocks(tmp_path, 1)
    blocks[0].plan(STEP)
    return blocks[0], registries[0]


def raising(error: Exception) -> object:
    def populate(tensors: Sequence[torch.Tensor]) -> None:
        raise error

    return populate


def test_its_pages_are_in_memory_afterwards(made: tuple[MappedBlock, Registry]) -> None:
    block, registry = made
    assert page_in(block, block.steps[0], StreamStats()) is None
    weight = registry["weight"]
    assert seems_cached(weight.data_ptr(), weight.nbytes)


@pytest.mark.parametrize("cached", [False, True])
def test_bytes_count_as_read_from_disk_unless_they_were_in_memory(
    made: tuple[MappedBlock, Registry], monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    monkeypatch.setattr(module, "is_page_cached", lambda address: cached)
    block, _ = made
    stats = StreamStats()
    page_in(block, block.steps[0], stats)
    assert stats.bytes_from_disk == (0 if cached else STEP)
    assert stats.seconds_reading > 0


def test_a_read_error_is_returned_with_file_and_module_named(
    made: tuple[MappedBlock, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = CheckpointError("Input/output error")
    monkeypatch.setattr(module, "populate", raising(cause))
    block, _ = made
    failure = page_in(block, block.steps[0], StreamStats())
    assert isinstance(failure, CheckpointFormatError)
    assert "model.safetensors" in str(failure)
    assert "'0'" in str(failure)
    assert failure.__cause__ is cause


def test_any_other_error_is_returned_as_it_is(
    made: tuple[MappedBlock, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = MemoryError("no page is free")
    monkeypatch.setattr(module, "populate", raising(error))
    block, _ = made
    assert page_in(block, block.steps[0], StreamStats()) is error


class Kernel:
    """What the watch asks."""

    faults = 0
    now = 100.0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(page_watch, "major_faults", lambda: found.faults)
    monkeypatch.setattr(page_watch.time, "monotonic", lambda: found.now)
    return found


@pytest.fixture
def block(tmp_path: Path) -> MappedBlock:
    (made,), _ = mapped_blocks(tmp_path, 1, elements=100)
    return made


def test_nothing_is_ready_before_it_was_said_to_be(kernel: Kernel, block: MappedBlock) -> None:
    watch = PageWatch()
    assert not watch.all_ready
    assert not watch.has_lost(block), "what was never there is not lost"


def test_a_page_that_had_to_be_read_again_tells(kernel: Kernel, block: MappedBlock) -> None:
    watch = PageWatch()
    kernel.faults = 3
    watch.begin()
    assert watch.all_ready
    assert not watch.has_lost(block)
    kernel.faults = 4
    assert watch.has_lost(block)
    assert not watch.all_ready


def test_a_first_page_that_is_gone_tells(kernel: Kernel, block: MappedBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = PageWatch()
    watch.begin()
    monkeypatch.setattr(MappedBlock, "seems_in_memory", lambda self: False)
    assert watch.has_lost(block)


def test_the_page_watch_looks_now_and_then_only(kernel: Kernel, block: MappedBlock) -> None:
    watch = PageWatch()
    watch.begin()
    assert watch.seems_complete(block)
    kernel.faults = 1
    kernel.now += page_watch.LOOK_SECONDS / 2
    assert watch.seems_complete(block)
    kernel.now += page_watch.LOOK_SECONDS
    assert not watch.seems_complete(block)
