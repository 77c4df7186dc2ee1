from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bigmodel.checkpoint import Checkpoint
from bigmodel.dispatch.transfer.files import SourceFiles
from bigmodel.dispatch.transfer.read_plan import GAP_BYTES, plan_reads
from bigmodel.dispatch.weights.block import Block, HostTensor
from bigmodel.limits import FILE_ALIGNMENT


def block_of(path: Path, names: list[str]) -> Block:
    checkpoint = Checkpoint.open(path)
    values = [checkpoint.tensor(name) for name in names]
    return Block("block", [HostTensor(value, value.dtype) for value in values])


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=8), pages=st.integers(1, 5), data=st.data())
def test_chunks_cover_every_byte_once_and_are_aligned(
    tmp_path: Path, sizes: list[int], pages: int, data: st.DataObject
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({str(n): torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}, path)
    names = data.draw(st.lists(st.sampled_from([str(n) for n in range(len(sizes))]), unique=True, min_size=1))
    block = block_of(path, names)
    reads = plan_reads(block, SourceFiles(), pages * FILE_ALIGNMENT)
    content = path.read_bytes()
    start = {str(n): Checkpoint.open(path).entry(str(n)).offset for n in range(len(sizes))}
    covered = [bytearray(tensor.value.nbytes) for tensor in block.tensors]
    for chunk in reads.chunks:
        assert chunk.offset % FILE_ALIGNMENT == 0
        assert chunk.nbytes % FILE_ALIGNMENT == 0
        assert chunk.needed <= chunk.nbytes <= pages * FILE_ALIGNMENT
        assert chunk.offset + chunk.needed <= len(content)
        for piece in chunk.segments:
            assert chunk.offset + piece.offset == start[names[piece.tensor]] + piece.start
            assert piece.offset + piece.nbytes <= chunk.needed
            for byte in range(piece.start, piece.start + piece.nbytes):
                covered[piece.tensor][byte] += 1
    assert all(set(counts) == {1} for counts in covered)
    assert reads.nbytes == block.nbytes


@pytest.mark.parametrize(("gap", "reads"), [(0, 1), (GAP_BYTES // 2, 1), (GAP_BYTES * 2, 2)])
def test_tensors_close_to_each_other_are_read_at_once(tmp_path: Path, gap: int, reads: int) -> None:
    path = tmp_path / "model.safetensors"
    sizes = {"a": 100, "b": gap, "c": 100}
    save_file({name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items() if size}, path)
    assert len(plan_reads(block_of(path, ["a", "c"]), SourceFiles(), 2**20).chunks) == reads


def test_tensors_without_a_file_or_changed_since_come_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(5000) for name in "abc"}, path)
    block = block_of(path, ["a", "b", "c"])
    block.tensors[0].value = torch.ones(5000)
    block.tensors[2].value.data[4000] = 1
    reads = plan_reads(block, SourceFiles(), 2**20)
    assert 0 in reads.from_memory
    assert 2 in reads.from_memory
