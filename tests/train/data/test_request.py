"""What is known of a loader before it is prepared, and loaders made anew from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from bigmodel.errors import TrainError
from bigmodel.train import DataLoaderConfiguration
from bigmodel.train.data.request import LoaderRequest, can_shard, data_ranks, loader_class, rebuild

DATA = TensorDataset(torch.arange(12))


def request(loader: DataLoader[Any], processes: int = 2, **config: Any) -> LoaderRequest:
    return LoaderRequest(loader, DataLoaderConfiguration(**config), processes, 0, None, ())


def test_a_process_s_share_of_a_batch() -> None:
    loader: Any = DataLoader(DATA, batch_size=6)
    assert request(loader).share == 6
    assert request(loader, split_batches=True).share == 3
    assert request(loader, processes=1, split_batches=True).share == 6
    sampled: Any = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, drop_last=False))
    assert request(sampled, split_batches=True).share == 2
    assert request(DataLoader(DATA, batch_size=None)).share is None
    with pytest.raises(TrainError, match="a batch of 6 does not divide among 4 processes"):
        request(loader, processes=4, split_batches=True).share  # noqa: B018


def test_a_rebuilt_loader_keeps_its_settings() -> None:
    loader: Any = DataLoader(DATA, batch_size=2, collate_fn=list, timeout=0, pin_memory=False)
    other = rebuild(request(loader), DATA, batch_size=3)
    assert (other.batch_size, other.collate_fn) == (3, list)
    assert type(other) is loader_class(loader) is DataLoader


def test_workers_of_a_rebuilt_loader_start_as_those_of_the_loader() -> None:
    loader: Any = DataLoader(DATA, num_workers=1, multiprocessing_context="forkserver", prefetch_factor=3)
    other = rebuild(request(loader), DATA)
    assert other.multiprocessing_context.get_start_method() == "forkserver"  # type: ignore[union-attr]
    assert (other.num_workers, other.prefetch_factor) == (1, 3)


class Sharded(Dataset[int]):
    num_shards = 1

    def shard(self, num_shards: int, index: int) -> Dataset[int]:
        return self

    def __getitem__(self, index: int) -> int:
        return index


class OtherShard(Sharded):
    def shard(self, count: int) -> Dataset[int]:  # type: ignore[override]
        return self


def test_a_dataset_may_say_that_it_can_be_sharded() -> None:
    assert not can_shard(request(DataLoader(Sharded())))  # into one piece only
    assert can_shard(request(DataLoader(Sharded()), processes=1))
    assert not can_shard(request(DataLoader(OtherShard()), processes=1))
    assert not can_shard(request(DataLoader(DATA), processes=1))
    assert not can_shard(request(DataLoader(Sharded(), batch_size=None), processes=1))


@pytest.mark.parametrize(
    ("names", "expected"),
    [(("dp_replicate", "dp_shard", "tp"), (6, 5)), (("dp", "tp", "cp"), (2, 1)), (("tp", "cp", "pp"), (1, 0))],
)
def test_processes_of_one_tensor_parallel_group_read_the_same(
    names: tuple[str, ...], expected: tuple[int, int]
) -> None:
    sizes, place = (2, 3, 4), (1, 2, 3)
    mesh = SimpleNamespace(mesh_dim_names=names, size=sizes.__getitem__, get_local_rank=place.__getitem__)
    assert data_ranks(mesh) == expected
