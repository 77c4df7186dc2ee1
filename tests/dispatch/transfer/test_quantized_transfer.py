"""What is copied for a block, and into which device memory."""

import pytest
import torch

from bigmodel.devices import copy_stream
from bigmodel.dispatch.transfer import quantized_transfer
from bigmodel.dispatch.transfer.quantized_transfer import QuantizedTransfers, Transfer
from bigmodel.dispatch.weights.block import Block, HostTensor
from bigmodel.dispatch.weights.quantized_block import QuantizedBlock, packings_of
from bigmodel.limits import RESTORE_BUFFERS

HOST = torch.device("cpu")


def weights(seed: int, rows: int = 16) -> list[HostTensor]:
    matrix = torch.randn(rows, 128, generator=torch.manual_seed(seed))
    vector = torch.randn(128, generator=torch.manual_seed(seed + 1))
    return [HostTensor(matrix, matrix.dtype, name="matrix"), HostTensor(vector, vector.dtype, name="vector")]


def quantized(seed: int, rows: int = 16, kind: str = "int4") -> QuantizedBlock:
    tensors = weights(seed, rows)
    block = QuantizedBlock(str(seed), tensors, packings_of(tensors, kind))
    block.carry_in_memory(pin=False)
    return block


def arrive(coming: Transfer) -> None:
    """Copy as a link would, and wait until the block is there."""
    link = copy_stream(HOST)
    copied = link.submit(lambda: coming.block.fetch(coming.into), coming.before(()))
    coming.finish(copied).wait()


def slot_for(block: Block) -> torch.Tensor:
    return torch.zeros(block.layout.nbytes, dtype=torch.uint8)


def test_an_exact_block_is_copied_straight_into_its_slot() -> None:
    block = Block("exact", weights(0))
    memory = slot_for(block)
    arrive(Transfer(block, memory))
    for shown, tensor in zip(block.layout.views(memory), block.tensors):
        assert torch.equal(shown, tensor.value)


def test_carriers_take_turns_in_one_staging_memory() -> None:
    blocks = [quantized(seed, rows) for seed, rows in ((0, 16), (1, 64), (2, 32))]
    staging = QuantizedTransfers(HOST, blocks)
    largest = blocks[1]
    assert staging.nbytes == RESTORE_BUFFERS * largest.carrier.layout.nbytes + largest.scratch_bytes
    for block in blocks:
        memory = slot_for(block)
        arrive(staging.start(block, memory))
        matrix, vector = block.layout.views(memory)
        exact = block.tensors[0].value
        assert 0 < float((matrix - exact).norm() / exact.norm()) < 0.15
        assert torch.equal(vector, block.tensors[1].value)


def test_nothing_quantised_needs_no_staging() -> None:
    assert QuantizedTransfers(HOST, []).nbytes == 0


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("least", [1, 700, 2**20])
def test_a_block_that_comes_in_parts_is_the_one_that_comes_whole(
    kind: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_transfer, "PART_BYTES", least)
    block = quantized(3, rows=48, kind=kind)
    staging, whole, parts = QuantizedTransfers(HOST, [block]), slot_for(block), slot_for(block)
    arrive(staging.start(block, whole))
    staging.start(block, parts).run(copy_stream(HOST), ()).wait()
    for one, other in zip(block.layout.views(whole), block.layout.views(parts)):
        assert torch.equal(one, other)


def test_a_part_that_fails_fails_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_transfer, "PART_BYTES", 1)
    block = quantized(3, rows=48)
    coming = QuantizedTransfers(HOST, [block]).start(block, slot_for(block))
    copied = iter([OSError("the link is gone"), None])

    def copy(begin: int, end: int) -> None:
        failure = next(copied)
        if failure is not None:
            raise failure

    monkeypatch.setattr(coming, "_copy", copy)
    event = coming.run(copy_stream(HOST), ())
    with pytest.raises(OSError, match="the link is gone"):
        event.wait()
