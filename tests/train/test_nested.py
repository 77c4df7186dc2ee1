"""Tensors inside lists, tuples, dicts and dataclasses."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train.nested import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    honor_type,
    is_namedtuple,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "x"
    derived: Any = field(default=None, init=False)


class Movable:
    device = "nowhere"

    def to(self, device: Any) -> Movable:
        moved = Movable()
        moved.device = str(device)
        return moved


def test_every_tensor_is_mapped_and_every_type_kept() -> None:
    one = torch.ones(2)
    data = {"list": [one, 3], "tuple": (one,), "pair": Pair(one, "s"), "data": Frozen(one), "none": None}
    doubled = recursively_apply(lambda t: 2 * t, data)
    assert doubled["list"][1] == 3
    assert isinstance(doubled["tuple"], tuple)
    assert isinstance(doubled["pair"], Pair)
    assert isinstance(doubled["data"], Frozen)
    assert doubled["none"] is None
    found = [doubled["list"][0], doubled["tuple"][0], doubled["pair"].left, doubled["data"].x]
    assert all(torch.equal(t, 2 * one) for t in found)
    assert torch.equal(data["data"].x, one)


def test_mappings_keep_their_class() -> None:
    one = torch.ones(1)
    counted = recursively_apply(lambda t: t + 1, defaultdict(list, a=one))
    assert counted["new"] == []
    assert isinstance(recursively_apply(lambda t: t, OrderedDict(a=one)), OrderedDict)
    assert isinstance(recursively_apply(lambda t: t, UserDict(a=one)), UserDict)


def test_other_leaves_are_refused_where_asked() -> None:
    with pytest.raises(TrainError, match="not on str"):
        recursively_apply(torch.clone, ["text"], error_on_other_type=True)


@pytest.mark.usefixtures("accelerators")
def test_everything_is_sent_to_the_device() -> None:
    device = torch.device("virtual:0")
    data = {"x": torch.ones(1), "d": Frozen(torch.ones(1)), "m": Movable(), "s": "text", "n": 3}
    sent = send_to_device(data, device)
    assert sent["x"].device == sent["d"].x.device == device
    assert sent["m"].device == "virtual:0"
    assert (sent["s"], sent["n"], sent["d"].name) == ("text", 3, "x")


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("skip", ["kept", ["kept"]])
def test_skipped_keys_stay_where_they_are(skip: Any) -> None:
    sent = send_to_device({"kept": torch.ones(1), "sent": torch.ones(1)}, "virtual:0", skip_keys=skip)
    assert (sent["kept"].device.type, sent["sent"].device.type) == ("cpu", "virtual")


def test_half_precision_becomes_float32_and_nothing_else_changes() -> None:
    data = [torch.ones(1, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64)]
    assert [t.dtype for t in convert_to_fp32(data)] == [torch.float32, torch.float32, torch.float64, torch.int64]


def test_batch_size_and_device_are_those_of_the_first_tensor() -> None:
    data = {"scalar": torch.tensor(1.0), "rows": [torch.ones(3, 2)]}
    assert find_batch_size(data) == 3
    assert find_device(data) == torch.device("cpu")
    assert find_batch_size({"n": 1}) is None
    assert find_device([]) is None


def test_slicing_cuts_every_tensor_but_scalars() -> None:
    sliced = slice_tensors({"x": torch.arange(5), "s": torch.tensor(7)}, slice(1, 3))
    assert sliced["x"].tolist() == [1, 2]
    assert sliced["s"].item() == 7


def test_structures_are_concatenated_leaf_by_leaf() -> None:
    parts = [{"x": torch.tensor([i]), "p": Pair(torch.tensor([i]), [torch.tensor([i])])} for i in range(3)]
    whole = concatenate(parts)
    assert whole["x"].tolist() == whole["p"].left.tolist() == whole["p"].right[0].tolist() == [0, 1, 2]
    with pytest.raises(TrainError, match="not on int"):
        concatenate([1, 2])


def test_small_helpers() -> None:
    assert listify({"x": torch.tensor([1, 2])}) == {"x": [1, 2]}
    assert honor_type(Pair(0, 0), [1, 2]) == Pair(1, 2)
    assert is_namedtuple(Pair(0, 0))
    assert not is_namedtuple((0, 0))
