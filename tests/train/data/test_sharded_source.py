"""Processes that read parts of different length stay in step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from bigmodel.errors import TrainError
from bigmodel.train import PartialState
from bigmodel.train.data.sharded_source import ShardedSource
from tests.train.multiprocess import on_ranks


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
    with pytest.raises(TypeError, match="does not say how many"):
        len(source([1, 1]))
    assert len(ShardedSource(source([1, 1]).base, None, length=4)) == 4
