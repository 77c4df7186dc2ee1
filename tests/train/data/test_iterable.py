"""IterableDatasetShard, stream batches with a marked last one, and processes of unequal length staying in step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset
from torch.utils.data._utils.collate import default_collate

from bigmodel.errors import TrainError
from bigmodel.train import BatchSamplerShard, IterableDatasetShard, PartialState
from bigmodel.train.data.iterable import (
    CountedBatch,
    CountedDatasetShard,
    CountingCollate,
    IterableSource,
    ShardedSource,
    TailSample,
    as_step,
)
from tests.train.multiprocess import on_ranks


class Numbers(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, None

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def plain(samples: list[Any]) -> list[int]:
    return [sample.value if isinstance(sample, TailSample) else sample for sample in samples]


@given(
    samples=st.integers(0, 50),
    share=st.integers(1, 4),
    processes=st.integers(1, 4),
    split=st.booleans(),
    even=st.booleans(),
    drop=st.booleans(),
)
def test_a_process_reads_what_it_would_of_a_map_style_dataset(
    samples: int, share: int, processes: int, split: bool, even: bool, drop: bool
) -> None:
    size = share * processes if split else share
    for rank in range(processes):
        shard = IterableDatasetShard(Numbers(samples), size, drop, processes, rank, split, even)
        read = list(shard)
        assert len(shard) == len(read)
        if processes > 1 and not (split and drop):
            batches = BatchSamplerShard(BatchSampler(range(samples), size, drop), processes, rank, split, even)
            assert plain(read) == [index for batch in batches for index in batch]


def test_samples_of_the_last_round_say_whose_they_are() -> None:
    tails = [list(CountedDatasetShard(Numbers(5), 2, False, 2, rank)) for rank in range(2)]
    assert tails[0] == [0, 1, TailSample(4, True, 1), TailSample(0, False, 1)]
    assert tails[1] == [2, 3, TailSample(1, False, 1), TailSample(2, False, 1)]


def test_a_shard_that_is_made_by_hand_has_the_samples_alone() -> None:
    found = [list(IterableDatasetShard(Numbers(5), 2, False, 2, rank)) for rank in range(2)]
    assert found == [[0, 1, 4, 0], [2, 3, 1, 2]]


def test_collating_counts_the_own_samples_of_the_last_round() -> None:
    collate = CountingCollate(default_collate)
    counted = collate([TailSample(4, True, 1), TailSample(0, False, 1)])
    assert isinstance(counted, CountedBatch)
    assert (counted.rows, counted.real, counted.total_real) == (2, 1, 1)
    assert torch.equal(counted.batch, torch.tensor([4, 0]))
    assert torch.equal(collate([1, 2]), torch.tensor([1, 2]))


def test_the_dataset_is_told_the_epoch() -> None:
    dataset = Numbers(3)
    IterableDatasetShard(dataset).set_epoch(4)
    assert dataset.epoch == 4


class Stateful(DataLoader[Any]):
    """Knows how many batches it has given."""

    given = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}


def test_the_last_batch_is_known_as_such() -> None:
    source = IterableSource(DataLoader(Numbers(5), batch_size=2))
    assert [(step.batch.tolist(), step.last) for step in source.open(1)] == [([2, 3], False), ([4], True)]
    assert list(source.open(3)) == []
    assert (len(source), source.runs_ahead) == (3, True)


def test_the_state_after_a_batch_is_that_before_the_next_is_read() -> None:
    source = IterableSource(Stateful(Numbers(3), batch_size=1))
    assert [step.state["given"] for step in source.open(0)] == [1, 2, 3]


def test_counted_batches_are_taken_out_of_their_wrapper() -> None:
    batch = torch.arange(4)
    step = as_step(CountedBatch(batch, 4, 3, 7), last=True)
    assert step.batch is batch
    assert (step.uneven, step.rows, step.real, step.total_real) == (True, 4, 3, 7)
    whole = as_step(CountedBatch(batch, 0, 1, -1), last=False)
    assert (whole.rows, whole.real) == (4, 4)
    assert as_step(batch, last=False).batch is batch


def source(samples: list[int]) -> ShardedSource:
    own = torch.arange(samples[PartialState().process_index])
    return ShardedSource(DataLoader(TensorDataset(own), batch_size=2), dist.group.WORLD)


@on_ranks
def test_who_has_no_batch_repeats_its_last_and_counts_none_of_it() -> None:
    steps = list(source([5, 2]).open(0))
    assert [step.last for step in steps] == [False, False, True]
    assert [step.uneven for step in steps] == [False, True, True]
    real = [step.real for step in steps if step.uneven]
    assert real == [[2, 1], [0, 0]][PartialState().process_index]
    assert [len(step.batch[0]) for step in steps] == [[2, 2, 1], [2, 2, 2]][PartialState().process_index]


@on_ranks
def test_a_process_without_any_batch_is_an_error_on_both() -> None:
    with pytest.raises(TrainError, match="has no batch at all"):
        list(source([2, 0]).open(0))


@on_ranks
def test_a_length_nobody_knows_is_none() -> None:
    with pytest.raises(TypeError, match="has no length"):
        len(source([1, 1]))
    assert len(ShardedSource(source([1, 1]).base, None, length=4)) == 4
