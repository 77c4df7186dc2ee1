"""What is known of each batch, and how many of its rows count."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bigmodel.train.data.batch_shard import BatchSamplerShard
from bigmodel.train.data.steps import MapSource, Step, real_rows


@pytest.mark.parametrize(
    ("uneven", "rows", "real", "length", "expected"),
    [
        (False, 0, 0, 4, 4),
        (True, 4, 3, 4, 3),
        (True, 4, 3, 8, 6),  # two outputs for each sample
        (True, 4, 3, 7, 7),  # nothing to do with the samples
        (True, 4, 0, 4, 0),
    ],
)
def test_repeated_samples_do_not_count(uneven: bool, rows: int, real: int, length: int, expected: int) -> None:
    assert real_rows(Step(torch.zeros(4), False, uneven, rows, real), length) == expected


def source(index: int) -> MapSource:
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
    shard = BatchSamplerShard(loader.batch_sampler, 2, index)
    return MapSource(DataLoader(loader.dataset, batch_sampler=shard), shard)


def test_the_last_batch_is_known_as_such_and_its_own_samples_are_counted() -> None:
    steps = [list(source(index).open(0)) for index in range(2)]
    assert [[step.last for step in own] for own in steps] == [[False, True]] * 2
    assert [[step.real if step.uneven else 2 for step in own] for own in steps] == [[2, 2], [2, 1]]
    assert {own[-1].total_real for own in steps} == {3}


def test_batches_are_skipped_without_being_read() -> None:
    (step,) = source(0).open(1)
    assert step.batch[0].tolist() == [4, 5]
    assert len(source(0)) == 2
