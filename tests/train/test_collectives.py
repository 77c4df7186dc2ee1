"""Collectives on one and two processes, padding, and debug mode's shape checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train import PartialState
from bigmodel.train.collectives import (
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    gather_uneven,
    pad_across_processes,
    pad_input_tensors,
    reduce,
)
from tests.train.multiprocess import on_ranks


def rank() -> int:
    return PartialState().process_index


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64]


@on_ranks
def test_tensors_of_every_dtype_are_gathered_in_the_order_of_ranks() -> None:
    for dtype in [*DTYPES, torch.float8_e4m3fn]:
        own = torch.tensor([[rank(), 1.0]]).to(dtype)
        whole = gather({"x": [own]})["x"][0]
        assert whole.dtype == dtype
        assert torch.equal(
            whole.float() if dtype == torch.float8_e4m3fn else whole.to(torch.float32),
            torch.tensor([[0.0, 1.0], [1.0, 1.0]]),
        )


@on_ranks
def test_scalars_and_transposed_and_empty_tensors_are_gathered() -> None:
    assert gather(torch.tensor(float(rank()))).tolist() == [0.0, 1.0]
    own = torch.arange(6).reshape(2, 3).T
    assert torch.equal(gather(own), torch.cat([own, own]))
    assert gather(torch.zeros(0, 4)).shape == (0, 4)


@on_ranks
def test_gathering_does_not_follow_gradients() -> None:
    assert not gather(torch.ones(1, requires_grad=True) * 2).requires_grad


@on_ranks
def test_gathering_other_things_is_refused() -> None:
    with pytest.raises(TrainError, match="not on str"):
        gather(["text"])


@on_ranks
def test_parts_of_different_length_are_gathered() -> None:
    own = torch.full((2 * rank() + 1, 2), rank())
    assert gather_uneven(own)[:, 0].tolist() == [0, 1, 1, 1]
    assert gather_uneven(torch.zeros(rank(), dtype=torch.bool)).tolist() == [False]


@on_ranks
def test_objects_are_gathered_and_broadcast() -> None:
    assert gather_object([{"rank": rank()}, "x"]) == [{"rank": 0}, "x", {"rank": 1}, "x"]
    assert broadcast_object_list([rank(), {"a": rank()}], from_process=1) == [1, {"a": 1}]


@on_ranks
def test_tensors_are_broadcast_in_place() -> None:
    own: Any = {"x": torch.full((3,), rank()), "t": torch.full((2, 3), rank(), dtype=torch.bool).T}
    assert broadcast(own, from_process=1)["x"].tolist() == [1, 1, 1]
    assert own["x"].tolist() == [1, 1, 1]
    assert own["t"].all()


@on_ranks
def test_sums_and_means_leave_the_input_alone() -> None:
    own = torch.tensor([float(rank()), 2.0])
    assert reduce([own], "sum")[0].tolist() == [1.0, 4.0]
    assert reduce(own, "mean", scale=2.0).tolist() == [1.0, 4.0]
    assert reduce(torch.tensor([rank(), 1 - rank()]), "max").tolist() == [1, 1]
    assert reduce(own, "none").tolist() == own.tolist()
    assert own.tolist() == [float(rank()), 2.0]


def test_one_process_gets_back_what_it_gives() -> None:
    x = torch.ones(2)
    assert gather(x) is x
    assert gather_uneven(x) is x
    assert broadcast(x) is x
    assert gather_object(["a"]) == ["a"]
    assert broadcast_object_list([1]) == [1]


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(TrainError, match="'product'"):
        reduce(torch.ones(1), "product")


def test_one_process_reduces_to_a_copy_through_which_gradients_flow() -> None:
    x = torch.ones(2, requires_grad=True)
    total = reduce(x)
    total.sum().backward()
    with torch.no_grad():
        total += 1
    assert x.tolist() == [1.0, 1.0]
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


def test_one_process_scales_as_several_do() -> None:
    x = torch.ones(2)
    assert [reduce(x, kind, scale=0.5).tolist() for kind in ("sum", "mean", "max", "none")] == [
        [0.5] * 2,
        [0.5] * 2,
        [0.5] * 2,
        [1.0] * 2,
    ]


@on_ranks
def test_different_shapes_are_reported_for_each_process() -> None:
    state = PartialState()
    state.debug = True
    try:
        with pytest.raises(DistributedOperationException, match=r"(?s)gather.*process 0.*\[1\].*process 1.*\[2\]"):
            gather(torch.ones(state.process_index + 1))
        assert gather(torch.ones(2)).shape == (4,)
        with pytest.raises(DistributedOperationException, match=r"(?s)pad_across_processes.*process 0: \(1,"):
            pad_across_processes(torch.ones(1) if state.is_main_process else torch.ones(1, 1))
        assert pad_across_processes(torch.ones(state.process_index + 1)).shape == (2,)
    finally:
        state.debug = False


def test_the_mode_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    assert PartialState().debug


@on_ranks
def test_the_shorter_tensor_is_padded_to_the_longer() -> None:
    rank = PartialState().process_index
    own = torch.full((1, rank + 1), 5)
    assert pad_across_processes(own, dim=1, pad_index=-1).tolist() == [[5, -1], [5, 5]][rank : rank + 1]
    assert pad_across_processes(own, dim=-1, pad_first=True).tolist() == [[0, 5], [5, 5]][rank : rank + 1]
    assert pad_across_processes({"x": own}, dim=0)["x"] is own


@on_ranks
def test_tensors_without_the_dimension_are_left_alone() -> None:
    scalar = torch.tensor(1.0)
    assert pad_across_processes(scalar) is scalar


def test_one_process_pads_nothing() -> None:
    x = torch.ones(2)
    assert pad_across_processes(x) is x


def test_the_last_row_is_repeated_until_the_length_divides() -> None:
    padded = pad_input_tensors({"x": torch.arange(5), "other": torch.ones(2)}, batch_size=5, num_processes=4)
    assert padded["x"].tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert padded["other"].shape == (2,)
    whole = torch.ones(4)
    assert pad_input_tensors(whole, 4, 2) is whole
