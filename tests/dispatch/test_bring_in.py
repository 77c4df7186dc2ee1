"""One step of a mapped block is brought into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bigmodel.dispatch import bring_in as module
from bigmodel.dispatch.bring_in import bring_in
from bigmodel.dispatch.mapped_block import MappedBlock
from bigmodel.dispatch.page_cache import is_cached
from bigmodel.dispatch.stats import StreamStats
from bigmodel.errors import CheckpointError, CheckpointFormatError

from .mapped import Registry, mapped_blocks

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
    assert bring_in(block, block.steps[0], StreamStats()) is None
    weight = registry["weight"]
    assert is_cached(weight.data_ptr(), weight.nbytes)


@pytest.mark.parametrize("cached", [False, True])
def test_bytes_count_as_read_from_disk_unless_they_were_in_memory(
    made: tuple[MappedBlock, Registry], monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    monkeypatch.setattr(module, "is_page_cached", lambda address: cached)
    block, _ = made
    stats = StreamStats()
    bring_in(block, block.steps[0], stats)
    assert stats.bytes_from_disk == (0 if cached else STEP)
    assert stats.seconds_reading > 0


def test_a_read_error_is_returned_with_file_and_module_named(
    made: tuple[MappedBlock, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = CheckpointError("Input/output error")
    monkeypatch.setattr(module, "populate", raising(cause))
    block, _ = made
    failure = bring_in(block, block.steps[0], StreamStats())
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
    assert bring_in(block, block.steps[0], StreamStats()) is error
