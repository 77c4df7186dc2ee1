"""A block and its carrier: what crosses the link in the place of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import Checkpoint, is_untouched, mapped_region, save_model
from bigmodel.dispatch.transfer.page_cache import resident_bytes, seems_cached
from bigmodel.dispatch.weights.block import HostTensor
from bigmodel.dispatch.weights.quantized_block import QuantizedBlock, carry_on_disk, packings_of
from tests.marks import needs

pytestmark = needs("torchao")


def block_of(*values: torch.Tensor, kind: str = "int8") -> QuantizedBlock:
    tensors = [HostTensor(value, value.dtype, name=str(index)) for index, value in enumerate(values)]
    return QuantizedBlock("block", tensors, packings_of(tensors, kind))


def matrix(seed: int = 0, rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 128, generator=torch.manual_seed(seed))


def restored(block: QuantizedBlock) -> list[torch.Tensor]:
    staged = torch.empty(block.carrier.layout.nbytes, dtype=torch.uint8)
    memory = torch.empty(block.layout.nbytes, dtype=torch.uint8)
    block.carrier.fetch(staged)
    block.restore(staged, memory, torch.empty(block.scratch_bytes, dtype=torch.uint8))
    return block.layout.views(memory)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_in_memory_and_on_disk_the_carrier_stands_for_the_same_weights(kind: str, tmp_path: Path) -> None:
    in_memory, on_disk = (block_of(matrix(), torch.ones(7), kind=kind) for _ in range(2))
    in_memory.carry_in_memory(pin=False)
    carry_on_disk([on_disk], tmp_path)
    assert (in_memory.on_disk, on_disk.on_disk) == (False, True)
    assert in_memory.errors == on_disk.errors
    for one, other in zip(restored(in_memory), restored(on_disk)):
        assert torch.equal(one, other)


def test_vectors_and_buffers_are_carried_as_they_are() -> None:
    tensors = [HostTensor(torch.arange(5.0), torch.float32), HostTensor(matrix(), torch.float32, is_buffer=True)]
    block = QuantizedBlock("block", tensors, packings_of(tensors, "int8"))
    assert block.packings == [None, None]
    block.carry_in_memory(pin=False)
    for shown, tensor in zip(restored(block), tensors):
        assert torch.equal(shown, tensor.value)
    assert block.errors == {}


@pytest.mark.parametrize("home", ["memory", "disk"])
def test_only_weights_that_were_written_to_are_quantised_anew(home: str, tmp_path: Path) -> None:
    block = block_of(matrix(0), matrix(1), torch.ones(3))
    if home == "memory":
        block.carry_in_memory(pin=False)
    else:
        carry_on_disk([block], tmp_path)
    before = [view.clone() for view in restored(block)]
    block.carrier.tensors[1].value.fill_(0)
    block.tensors[0].value.neg_()
    block.tensors[2].value.add_(1)
    block.refresh()
    after = restored(block)
    assert float((after[0] + before[0]).abs().max()) < 0.1
    assert torch.equal(after[1], torch.zeros_like(before[1]))
    assert torch.equal(after[2], torch.full((3,), 2.0))


def test_a_replaced_weight_is_carried_in_the_place_of_the_old_one() -> None:
    block = block_of(matrix(0))
    block.carry_in_memory(pin=False)
    block.tensors[0].value = matrix(5)
    block.refresh()
    assert float((restored(block)[0] - matrix(5)).abs().max()) < 0.1


@pytest.mark.slow
def test_quantising_leaves_no_page_of_the_checkpoint_in_memory(tmp_path: Path) -> None:
    save_model(nn.Linear(4096, 4096, bias=False), tmp_path)
    weight = Checkpoint.open(tmp_path).tensor("weight", resident=True)
    before = resident_bytes()
    block = block_of(weight, kind="int4")
    block.carry_in_memory(pin=False)
    assert resident_bytes() - before < weight.nbytes  # the quantised one takes an eighth of that
    assert seems_cached(weight.data_ptr(), 4096)
    assert is_untouched(weight)
    assert mapped_region(block.carrier.tensors[0].value) is None


def test_weights_in_memory_of_their_own_are_left_alone() -> None:
    weight = matrix(rows=4096)
    block = block_of(weight)
    block.carry_in_memory(pin=False)
    assert torch.equal(weight, matrix(rows=4096))


def test_a_quantised_weight_that_wants_a_gradient_is_named() -> None:
    frozen = block_of(matrix(), nn.Parameter(torch.ones(3)))
    assert frozen.refuse_training() is None
    assert block_of(torch.ones(3), nn.Parameter(matrix())).refuse_training() == "1"
