from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bigmodel.checkpoint import load_checkpoint_in_model
from bigmodel.errors import CheckpointError, CheckpointMismatchError
from tests.checkpoint.helpers import Tied, assert_same, on_meta, save_sharded, saved_tensors, snapshot
from tests.train.multiprocess import run_on_ranks

FULL = saved_tensors(Tied())


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_model_of_distributed_tensors_is_filled(tmp_path: Path, group: None, broadcast: bool) -> None:
    folder = save_sharded(tmp_path / "checkpoint", FULL, shards=2)
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint_in_model(model, folder, broadcast_from_rank0=broadcast, strict=True)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_same(gathered(model), FULL | {"head.weight": FULL["embed.weight"]})


def test_a_checkpoint_that_does_not_fit_is_refused_here_too(tmp_path: Path, group: None) -> None:
    folder = save_sharded(tmp_path / "checkpoint", FULL | {"scale": torch.zeros(5)}, shards=2)
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(CheckpointMismatchError, match="scale has shape"):
        load_checkpoint_in_model(model, folder)


def test_one_process_alone_cannot_read_for_others(tmp_path: Path) -> None:
    folder = save_sharded(tmp_path, FULL, shards=1)
    model = on_meta(Tied())
    before = snapshot(model)
    with pytest.raises(CheckpointError, match="init_process_group"):
        load_checkpoint_in_model(model, folder, broadcast_from_rank0=True)
    assert snapshot(model) == before


def test_a_map_and_one_reader_for_all_exclude_each_other(tmp_path: Path, group: None) -> None:
    folder = save_sharded(tmp_path / "checkpoint", FULL, shards=1)
    with pytest.raises(CheckpointError, match="exclude each other"):
        load_checkpoint_in_model(Tied(), folder, {"": "cpu"}, broadcast_from_rank0=True)


def load_shards(folder: Path, expected_file: Path) -> None:
    """As one of two processes, load the checkpoint in `folder`, and compare it with the tensors of the other file."""
    mesh = init_device_mesh("cpu", (2,))
    expected = torch.load(expected_file, weights_only=True)
    for broadcast in (False, True):
        model = Tied()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(dist.get_rank())
        fully_shard(model, mesh=mesh)
        load_checkpoint_in_model(model, folder, broadcast_from_rank0=broadcast)
        assert_same(gathered(model), expected)


@pytest.mark.slow
def test_two_processes_load_their_shards_whether_each_reads_or_rank_0_broadcasts(tmp_path: Path) -> None:
    folder = save_sharded(tmp_path / "checkpoint", FULL, shards=2)
    torch.save(FULL | {"head.weight": FULL["embed.weight"]}, tmp_path / "expected.pt")
    run_on_ranks(load_shards, folder, tmp_path / "expected.pt")
