"""Collectives on two processes, and on one, where they give back what they get."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train import PartialState
from bigmodel.train.operations.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    gather_uneven,
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
    assert [reduce(x, kind, scale=0.5).tolist() for kind in ("sum", "mean", "none")] == [
        [0.5] * 2,
        [0.5] * 2,
        [1.0] * 2,
    ]
