"""What process 0 has read, divided among processes: every sample once, equal parts where that is asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import TrainError
from bigmodel.train.data.cutting import cut_evenly, one_each


def batches(sizes: list[int]) -> list[torch.Tensor]:
    numbers = torch.arange(1, sum(sizes) + 1)
    return list(numbers.split(sizes))


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_process_gets_a_whole_batch_and_every_sample_counts_once(
    processes: int, size: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, processes))
    last = data.draw(st.integers(1, size))
    group = batches([size] * (count - 1) + [last])
    first = [torch.full((size,), -1)] * processes
    parts = one_each(group, first, processes, even=True, drop_last=False)
    assert [len(part.batch) for part in parts] == [size] * processes
    assert torch.cat([part.batch[: part.real] for part in parts]).tolist() == torch.cat(group).tolist()
    assert {part.total_real for part in parts} == {sum(map(len, group))}
    assert {part.uneven for part in parts} == {(count, last) != (processes, size)}


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_one_batch_is_cut_into_equal_parts(processes: int, share: int, data: st.DataObject) -> None:
    whole = processes * share
    total = data.draw(st.integers(1, whole))
    batch = {"x": torch.arange(total), "names": [str(number) for number in range(total)], "scale": torch.tensor(2.0)}
    first = {"x": torch.full((whole,), -1), "names": ["-"] * whole, "scale": torch.tensor(2.0)}
    parts = cut_evenly(batch, first, processes, even=True)
    assert [len(part.batch["x"]) for part in parts] == [share] * processes
    assert [number for part in parts for number in part.batch["x"][: part.real].tolist()] == list(range(total))
    assert [name for part in parts for name in part.batch["names"][: part.real]] == batch["names"]
    assert all(part.batch["scale"] == 2.0 for part in parts)


def test_an_incomplete_round_is_left_out_or_refused() -> None:
    first = batches([2, 2])
    assert one_each(first[:1], first, 2, even=True, drop_last=True) == []
    with pytest.raises(TrainError, match="every process needs a batch"):
        one_each(first[:1], first, 2, even=False, drop_last=False)
    with pytest.raises(TrainError, match="every process needs a batch"):
        cut_evenly(torch.ones(2), torch.ones(4), 2, even=False)


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
    part = one_each([short], [first], 1, even=True, drop_last=False, size=2)[0]
    assert part.batch is short
    assert (part.rows, part.real) == (1, 1)
