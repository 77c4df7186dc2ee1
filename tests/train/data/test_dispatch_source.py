"""Process 0 reads, both train; an error while reading is an error on both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.errors import TrainError
from bigmodel.train import PartialState
from bigmodel.train.data.dispatch_source import DispatchSource
from tests.train.multiprocess import on_ranks


class Numbers(IterableDataset[Any]):
    """Numbers in a dict with a name; the one at `fails` cannot be read."""

    def __init__(self, length: int, fails: int = -1) -> None:
        self.length, self.fails = length, fails

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        assert PartialState().process_index == 0, "only process 0 reads"
        for number in range(self.length):
            if number == self.fails:
                raise OSError("the disk is gone")
            yield {"x": torch.tensor([number, -number], dtype=torch.bfloat16), "name": f"n{number}"}


def source(dataset: Numbers, **options: Any) -> DispatchSource:
    return DispatchSource(
        DataLoader(dataset, batch_size=2), dist.group.WORLD, 2, PartialState().process_index, **options
    )


@on_ranks
def test_batches_of_any_dtype_are_dealt_with_what_is_no_tensor() -> None:
    rank = PartialState().process_index
    steps = list(source(Numbers(8)).open(0))
    assert [step.batch["x"][:, 0].tolist() for step in steps] == [
        [2 * rank, 2 * rank + 1],
        [2 * rank + 4, 2 * rank + 5],
    ]
    assert steps[0].batch["name"] == [f"n{2 * rank}", f"n{2 * rank + 1}"]
    assert steps[0].batch["x"].dtype == torch.bfloat16
    assert [step.last for step in steps] == [False, True]


@on_ranks
def test_batches_are_cut_in_parts_and_skipped() -> None:
    rank = PartialState().process_index
    split = source(Numbers(6), split_batches=True)
    assert [step.batch["x"][:, 0].tolist() for step in split.open(1)] == [[2 + rank], [4 + rank]]
    assert len(split) == 3
    assert (len(source(Numbers(6))), len(source(Numbers(6), drop_last=True))) == (2, 1)


@on_ranks
def test_an_error_while_reading_is_told_to_everybody() -> None:
    with pytest.raises((OSError, TrainError)) as caught:
        list(source(Numbers(9, fails=5)).open(0))
    assert "the disk is gone" in str(caught.value)
    if PartialState().process_index:
        assert "process 0 failed while reading the data: OSError" in str(caught.value)
