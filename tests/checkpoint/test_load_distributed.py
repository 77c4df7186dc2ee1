from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bigmodel.checkpoint import load_checkpoint_in_model
from bigmodel.errors import CheckpointError, CheckpointMismatchError
from bigmodel.train.state.process_group import leave_at_exit
from tests.checkpoint.helpers import Tied, assert_same, on_meta, save_sharded, saved_tensors, snapshot

FULL = saved_tensors(Tied())


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    start(0, 1, tmp_path / "store")
    yield
    dist.destroy_process_group()


def start(rank: int, world_size: int, store: Path) -> None:
    file_store = dist.FileStore(str(store), world_size)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))


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


def _worker(rank: int, folder: Path, store: Path) -> None:
    start(rank, 2, store)
    leave_at_exit()
    mesh = init_device_mesh("cpu", (2,))
    expected = torch.load(store.parent / "expected.pt", weights_only=True)
    for broadcast in (False, True):
        model = Tied()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank)
        fully_shard(model, mesh=mesh)
        load_checkpoint_in_model(model, folder, broadcast_from_rank0=broadcast)
        assert_same(gathered(model), expected)


@pytest.mark.slow
def test_two_processes_load_their_shards_whether_each_reads_or_rank_0_broadcasts(tmp_path: Path) -> None:
    folder = save_sharded(tmp_path / "checkpoint", FULL, shards=2)
    torch.save(FULL | {"head.weight": FULL["embed.weight"]}, tmp_path / "expected.pt")
    multiprocessing.spawn(_worker, (folder, tmp_path / "store"), nprocs=2)
