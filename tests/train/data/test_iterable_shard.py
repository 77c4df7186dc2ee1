"""IterableDatasetShard: every process reads all and keeps its part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data._utils.collate import default_collate

from bigmodel.train import BatchSamplerShard, IterableDatasetShard
from bigmodel.train.data.iterable_shard import CountedBatch, CountingCollate, TailSample


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
    tails = [list(IterableDatasetShard(Numbers(5), 2, False, 2, rank)) for rank in range(2)]
    assert tails[0] == [0, 1, TailSample(4, True, 1), TailSample(0, False, 1)]
    assert tails[1] == [2, 3, TailSample(1, False, 1), TailSample(2, False, 1)]


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
