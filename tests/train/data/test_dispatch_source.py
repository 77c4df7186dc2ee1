"""Process 0 reads batches and distributes them: every sample once, and read errors raised on every process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.errors import TrainError
from bigmodel.train import PartialState
from bigmodel.train.data.dispatch_source import DispatchSource, cut_evenly, one_each
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


@pytest.mark.slow
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


def batches(sizes: list[int]) -> list[torch.Tensor]:
    numbers = torch.arange(1, sum(sizes) + 1)
    return list(numbers.split(sizes))


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_the_rows_of_a_round_are_divided_and_every_sample_counts_once(
    processes: int, size: int, even: bool, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, processes))
    last = data.draw(st.integers(1, size))
    group = batches([size] * (count - 1) + [last])
    total = sum(map(len, group))
    only_round = data.draw(st.booleans())
    first = group if only_round else [torch.full((size,), -1)] * processes
    if not even and total < processes:
        with pytest.raises(TrainError, match="every process needs a batch"):
            one_each(group, first, processes, even, size)
        return
    parts = one_each(group, first, processes, even, size)
    fewest, most = (-(-total // processes) if even else total // processes), -(-total // processes)
    assert {fewest, most} >= {len(part.batch) for part in parts}
    assert torch.cat([part.batch[: part.real] for part in parts]).tolist() == torch.cat(group).tolist()
    assert {part.total_real for part in parts} == {total}
    assert {part.uneven for part in parts} == {(count, last) != (processes, size)}


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_one_batch_is_cut_into_equal_parts(processes: int, share: int, data: st.DataObject) -> None:
    whole = processes * share
    total = data.draw(st.integers(1, whole))
    batch = {"x": torch.arange(total), "names": [str(number) for number in range(total)], "scale": torch.tensor(2.0)}
    first = {"x": torch.full((whole,), -1), "names": ["-"] * whole, "scale": torch.tensor(2.0)}
    parts = cut_evenly(batch, first, processes, even=True)
    assert [len(part.batch["x"]) for part in parts] == [-(-total // processes)] * processes
    assert [number for part in parts for number in part.batch["x"][: part.real].tolist()] == list(range(total))
    assert [name for part in parts for name in part.batch["names"][: part.real]] == batch["names"]
    assert all(part.batch["scale"] == 2.0 for part in parts)


@on_ranks
def test_the_round_before_one_that_is_left_out_is_the_last() -> None:
    for length, rounds in ((8, 2), (9, 2), (10, 2), (2, 0)):
        steps = list(source(Numbers(length), drop_last=True).open(0))
        assert [step.last for step in steps] == [False, True][:rounds]


def test_a_batch_with_too_few_rows_that_is_not_filled_is_refused() -> None:
    with pytest.raises(TrainError, match="every process needs a batch"):
        cut_evenly(torch.ones(1), torch.ones(4), 2, even=False)


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(TrainError, match="a batch of 3 does not divide among 2 processes"):
        cut_evenly(torch.ones(3), torch.ones(3), 2, even=True)
    with pytest.raises(TrainError, match="batches that hold tensors"):
        cut_evenly(["a"], ["a"], 2, even=True)


def test_the_user_s_own_way_of_cutting_is_used() -> None:
    parts = cut_evenly(torch.arange(4), torch.arange(4), 2, True, lambda batch, bounds, rank, ranks: batch[rank::ranks])
    assert [part.batch.tolist() for part in parts] == [[0, 2], [1, 3]]


def test_rows_of_another_length_are_not_joined() -> None:
    short, first = torch.ones(1, 5), torch.ones(2, 3)
    part = one_each([short], [first], 1, even=True, size=2)[0]
    assert torch.equal(part.batch, short)
    assert (part.rows, part.real) == (1, 1)
    own, repeated, again = one_each([first, short], [first, first], 3, even=True)
    assert (own.batch, repeated.batch, again.batch) == (first, short, first)
    assert [part.real for part in (own, repeated, again)] == [2, 1, 0]
