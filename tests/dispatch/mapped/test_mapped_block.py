import os
from pathlib import Path

import pytest
import torch

from bigmodel.checkpoint import is_untouched
from bigmodel.dispatch.mapped.mapped_block import MappedBlock, Owner
from bigmodel.dispatch.transfer.files import SourceFiles
from bigmodel.dispatch.transfer.page_cache import is_page_cached, resident_bytes
from bigmodel.errors import CheckpointFormatError

from ..mapped_files import checkpoint_file, mapped_blocks, registries

MIB = 2**20


def test_steps_cover_the_weights(tmp_path: Path) -> None:
    (block,), (registry,) = mapped_blocks(tmp_path, 1, elements=1000)
    weight = registry["weight"]
    block.plan(step_bytes=768)
    assert [step.nbytes for step in block.steps] == [768] * 5 + [160]
    assert torch.equal(torch.cat([part for step in block.steps for part in step.tensors]).view(torch.float32), weight)


def test_small_tensors_share_a_step(tmp_path: Path) -> None:
    made = registries(checkpoint_file(tmp_path, 5, 10))
    block = MappedBlock("all", [Owner(registry, "weight") for registry in made], SourceFiles())
    block.plan(step_bytes=MIB)
    (step,) = block.steps
    assert (len(step.tensors), step.nbytes) == (5, 200)


def test_a_tied_weight_counts_once_and_what_is_looked_up_by_rows_not_at_all(tmp_path: Path) -> None:
    first, second = registries(checkpoint_file(tmp_path, 2, 100))
    owners = [Owner(first, "weight"), Owner(dict(first), "weight"), Owner(second, "weight", is_sparse=True)]
    block = MappedBlock("tied", owners, SourceFiles())
    assert block.nbytes == 400
    block.plan(MIB)
    assert sum(step.nbytes for step in block.steps) == 400


@pytest.mark.slow
def test_dropping_gives_memory_back_and_reading_brings_it_again(tmp_path: Path) -> None:
    (block,), (registry,) = mapped_blocks(tmp_path, 1, elements=16 * MIB)
    weight = registry["weight"]
    assert weight.sum() == 0
    before = resident_bytes()
    assert block.drop() == weight.nbytes
    assert before - resident_bytes() > 0.9 * weight.nbytes
    assert not weight.any()


@pytest.mark.parametrize("evicts", [False, True])
def test_dropped_pages_stay_in_the_page_cache_unless_they_are_evicted(evicts: bool, tmp_path: Path) -> None:
    (block, _), (registry, others) = mapped_blocks(tmp_path, 2)
    with (tmp_path / "model.safetensors").open("rb+") as file:
        os.fsync(file.fileno())  # dirty pages are not evicted
    weight, neighbour = registry["weight"], others["weight"]
    weight.sum(), neighbour.sum()
    assert block.drop(evict=evicts) == weight.nbytes
    assert is_page_cached(weight.data_ptr() + weight.nbytes // 2) is not evicts
    assert is_page_cached(neighbour.data_ptr() + neighbour.nbytes // 2)
    assert not weight.any()


def test_a_part_of_a_block_is_dropped_and_paged_in_again(tmp_path: Path) -> None:
    (block,), (registry,) = mapped_blocks(tmp_path, 1, elements=8 * MIB)
    weight = registry["weight"]
    block.plan(step_bytes=8 * MIB)
    while block.steps:
        block.paged_in += block.steps.popleft().nbytes
    weight.sum()
    with (tmp_path / "model.safetensors").open("rb+") as file:
        os.fsync(file.fileno())
    assert block.drop(8 * MIB + 1, evict=True) == 16 * MIB
    assert (block.paged_in, len(block.steps), block.is_ready) == (16 * MIB, 2, False)
    assert is_page_cached(weight.data_ptr() + 4 * MIB)
    assert not is_page_cached(weight.data_ptr() + 20 * MIB)
    assert not is_page_cached(weight.data_ptr() + 28 * MIB)
    assert block.drop(32 * MIB) == weight.nbytes, "all, as no more is in memory"
    assert (block.paged_in, block.planned) == (0, False)


def test_steps_that_are_not_paged_in_yet_stay_in_their_order_when_others_are_dropped(tmp_path: Path) -> None:
    (block,), _ = mapped_blocks(tmp_path, 1)
    block.plan(step_bytes=MIB // 4)
    whole = [step.tensors[0].data_ptr() for step in block.steps]
    for _ in range(2):
        block.paged_in += block.steps.popleft().nbytes
    block.drop(1)
    assert [step.tensors[0].data_ptr() for step in block.steps] == whole[1:]


def test_after_a_weight_was_replaced_all_of_a_block_is_dropped(tmp_path: Path) -> None:
    (block,), (registry,) = mapped_blocks(tmp_path, 1)
    block.plan(step_bytes=MIB // 4)
    while block.steps:
        block.paged_in += block.steps.popleft().nbytes
    registry["weight"] = torch.zeros(5)
    assert block.drop(1) == 0
    assert (block.paged_in, block.planned) == (0, False)


def test_of_a_part_written_pages_and_buffers_are_not_dropped(tmp_path: Path) -> None:
    made = registries(checkpoint_file(tmp_path, 3, 2**18))
    owners = [Owner(registry, "weight", is_buffer=at == 1) for at, registry in enumerate(made)]
    block = MappedBlock("all", owners, SourceFiles())
    block.plan(step_bytes=MIB)
    while block.steps:
        block.paged_in += block.steps.popleft().nbytes
    made[2]["weight"][5] = 7
    for registry in made:
        registry["weight"].sum()
    before = resident_bytes()
    assert block.drop(2 * MIB) == 2 * MIB
    assert before - resident_bytes() < MIB // 2
    assert made[2]["weight"][5] == 7


def test_written_pages_are_not_evicted(tmp_path: Path) -> None:
    (block,), (registry,) = mapped_blocks(tmp_path, 1)
    weight = registry["weight"]
    weight[5] = 3
    assert block.drop(evict=True) == 0
    assert weight[5] == 3


def test_written_pages_are_not_dropped(tmp_path: Path) -> None:
    (block,), (registry,) = mapped_blocks(tmp_path, 1)
    weight = registry["weight"]
    weight[5] = 3
    assert block.drop() == 0
    assert weight[5] == 3
    assert not is_untouched(weight)


def test_buffers_are_not_dropped(tmp_path: Path) -> None:
    (registry,) = registries(checkpoint_file(tmp_path, 1, MIB))
    block = MappedBlock("statistics", [Owner(registry, "weight", is_buffer=True)], SourceFiles())
    assert block.drop() == 0


def test_a_file_cut_short_is_noticed(tmp_path: Path) -> None:
    (block,), _ = mapped_blocks(tmp_path, 1)
    block.check_files()
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors: is 1000 bytes long.*cut short"):
        block.check_files()
