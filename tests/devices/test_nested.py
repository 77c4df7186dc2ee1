"""Containers are opened, walked in order and made again, each as its own kind."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from transformers.modeling_outputs import BaseModelOutput

from bigmodel.devices import memory_allocated
from bigmodel.devices.nested import (
    copy_to,
    first_tensor,
    flatten,
    iter_leaves,
    iter_tensors,
    map_leaves,
    map_tensors,
    send_to_device,
    spanned_elements,
)

from ..accelerators import at

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    kind: type = int


@dataclass
class Slotted:
    __slots__ = ("tensor",)
    tensor: torch.Tensor


class Registered:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


_pytree.register_pytree_node(Registered, lambda value: ([value.tensor], None), lambda new, _: Registered(new[0]))


@dataclass
class Batch:
    ids: torch.Tensor
    note: str


X = torch.ones(2)
THERE = "virtual:0"
CONTAINERS = {
    "list": [X],
    "tuple": (X, 3),
    "named tuple": Pair(X, "text"),
    "dict": {"a": X},
    "ordered dict": OrderedDict(a=X),
    "default dict": defaultdict(list, a=X),
    "user dict": UserDict(a=X),
    "mapping that cannot be written to": MappingProxyType({"a": X}),
    "dataclass": Slotted(X),
    "frozen dataclass": Frozen(X),
    "model output": BaseModelOutput(last_hidden_state=X),
    "packed sequence": nn.utils.rnn.pack_sequence([torch.ones(2, 1)]),
    "result of an operation": torch.ones(2, 2).max(dim=0),
}


@pytest.mark.parametrize("value", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_a_container_is_made_again_as_its_own_kind(value: Any) -> None:
    before = [tensor.tolist() for tensor in iter_tensors(value)]
    made = map_tensors(lambda tensor: tensor + 1, value)
    assert type(made) is type(value)
    assert [tensor.tolist() for tensor in iter_tensors(made)] == [
        (torch.tensor(numbers) + 1).tolist() for numbers in before
    ]
    assert [tensor.tolist() for tensor in iter_tensors(value)] == before


@pytest.mark.parametrize("value", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_a_container_in_which_nothing_changes_is_the_same_object(value: Any) -> None:
    assert map_leaves(lambda leaf: leaf, value) is value


def test_leaves_come_in_order_and_a_class_is_one() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    leaves = list(iter_leaves([{"b": x, "a": (1, None)}, Frozen(y), "text"]))
    assert leaves[0] is x
    assert leaves[1:3] == [1, None]
    assert leaves[3] is y
    assert leaves[4:] == [int, "text"]


def test_the_caller_may_name_further_leaves() -> None:
    value = [Frozen(X), (X,)]
    assert map_leaves(type, value, is_leaf=lambda each: isinstance(each, Frozen)) == [Frozen, (torch.Tensor,)]


def test_members_under_skipped_keys_stay_as_they_are() -> None:
    made = map_leaves(lambda leaf: leaf + 1, {"a": 1, "cache": [1], 2: Pair(1, 1)}, skip_keys={"cache"})
    assert made == {"a": 2, "cache": [1], 2: Pair(2, 2)}


def test_the_first_tensor_is_found_in_order() -> None:
    x, y = torch.ones(1), torch.ones(2)
    assert first_tensor((1, {"k": [None, x]}, y)) is x
    assert first_tensor([Frozen(y), x]) is y
    assert first_tensor({"k": "text"}) is None


def test_a_flattened_structure_does_not_notice_later_changes() -> None:
    value = {"a": [1, Frozen(X)], "b": (2,)}
    leaves, rebuild = flatten(value)
    value["a"].clear()
    del value["b"]
    made = rebuild(leaves)
    assert (made["a"][0], made["a"][1].tensor is X, made["b"]) == (1, True, (2,))
    assert rebuild(leaves)["a"] is not made["a"]


def test_classes_known_to_pytrees_are_opened_where_that_is_asked_for() -> None:
    value = (Registered(X), SimpleNamespace(tensor=X))
    assert list(iter_leaves(value)) == list(value)
    leaves, rebuild = flatten(value, registered=True)
    assert leaves[0] is X
    made = rebuild([X + 1, leaves[1]])
    assert (made[0].tensor.tolist(), made[1] is value[1]) == ([2, 2], True)
    assert len(list(iter_tensors(value, registered=True))) == 1


@pytest.mark.usefixtures("accelerators")
def test_a_number_is_the_accelerator_of_that_number() -> None:
    assert str(send_to_device([torch.ones(1)], 0)[0].device) == "virtual:0"


@pytest.mark.usefixtures("accelerators")
def test_every_container_is_rebuilt_with_its_tensors_moved() -> None:
    x = torch.ones(2)
    value = {"a": [x, (x, 3)], "b": Pair(x, "text"), "c": Batch(x, "note"), "d": OrderedDict(e=x)}
    moved = send_to_device(value, THERE)
    assert str(moved["a"][0].device) == str(moved["a"][1][0].device) == THERE
    assert isinstance(moved["b"], Pair)
    assert (str(moved["b"].left.device), moved["b"].right) == (THERE, "text")
    assert (str(moved["c"].ids.device), moved["c"].note) == (THERE, "note")
    assert isinstance(moved["d"], OrderedDict)
    assert value["c"].ids is x


@pytest.mark.usefixtures("accelerators")
def test_model_outputs_keep_their_class() -> None:
    moved = send_to_device(BaseModelOutput(last_hidden_state=torch.ones(2)), THERE)
    assert isinstance(moved, BaseModelOutput)
    assert str(moved.last_hidden_state.device) == str(moved["last_hidden_state"].device) == THERE


@pytest.mark.usefixtures("accelerators")
def test_structures_already_in_place_come_back_as_the_same_object() -> None:
    value = {"a": [torch.ones(1, device=THERE)], "b": (None, 1, "x")}
    assert send_to_device(value, THERE) is value


@pytest.mark.usefixtures("accelerators")
def test_skipped_keys_stay_where_they_are() -> None:
    moved = send_to_device({"a": torch.ones(1), "cache": torch.ones(1)}, THERE, skip_keys="cache")
    assert str(moved["a"].device) == THERE
    assert str(moved["cache"].device) == "cpu"


@pytest.mark.usefixtures("accelerators")
def test_an_object_that_can_move_itself_does() -> None:
    class Encoding:
        device = None

        def to(self, device: torch.device) -> str:
            return f"moved to {device}"

    assert send_to_device([Encoding()], THERE) == ["moved to virtual:0"]


class Latents:
    """A distribution as diffusers' autoencoders return it."""

    def __init__(self, mean: torch.Tensor) -> None:
        self.mean, self.deterministic = mean, False

    def sample(self) -> torch.Tensor:
        return self.mean + torch.ones(2, device=self.mean.device)

    def mode(self) -> torch.Tensor:
        return self.mean


def test_a_distribution_moves_with_its_parameters() -> None:
    given = Latents(torch.ones(2))
    moved = send_to_device({"latents": given}, "meta")["latents"]
    assert type(moved) is Latents
    assert (moved.sample().device.type, given.mean.device.type) == ("meta", "cpu")
    assert send_to_device(given, "cpu") is given
    normal = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1)
    assert send_to_device(normal, "meta").sample().device.type == "meta"
    assert normal.sample().device.type == "cpu"


@pytest.mark.usefixtures("accelerators")
def test_a_packed_sequence_moves_as_it_knows_it_may() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 8), [3, 2])
    moved = send_to_device((packed,), at(0))[0]
    assert type(moved) is type(packed)
    assert (str(moved.data.device), str(moved.batch_sizes.device)) == (at(0), "cpu")


def test_tensors_are_freed_without_a_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        tensor = torch.zeros(3)
        freed = weakref.ref(tensor)
        value = ([tensor], {"key": (tensor, None)})
        leaves, rebuild = flatten(value)
        map_leaves(lambda leaf: leaf, value)
        del tensor, value, leaves
        assert freed() is None
        assert rebuild([1, 2, 3]) == ([1], {"key": (2, 3)})
    finally:
        gc.enable()


@pytest.mark.usefixtures("accelerators")
def test_a_tensor_with_gaps_keeps_its_strides_and_its_values() -> None:
    rows = torch.arange(24.0).reshape(2, 4, 3)
    for tensor in (rows[:, -1:], rows[:, :, 1:], rows[::2, 1], rows.transpose(0, 1), rows[:, :1].expand(2, 5, 3)):
        moved = send_to_device(tensor, torch.device("virtual:0"))
        assert torch.equal(moved.cpu(), tensor)
        assert spanned_elements(moved) == moved.numel() or moved.stride() == tensor.stride()


@pytest.mark.usefixtures("accelerators")
def test_a_copy_takes_the_elements_that_a_tensor_spans() -> None:
    rows = torch.arange(24.0).reshape(2, 4, 3)
    before = memory_allocated("virtual:0")
    moved = send_to_device(rows[:, -1:], torch.device("virtual:0"))
    assert memory_allocated("virtual:0") - before == 4 * spanned_elements(rows[:, -1:]) == 4 * 15
    assert moved.stride() == (12, 3, 1)
    assert spanned_elements(rows) == spanned_elements(rows.mT) == 24


@pytest.mark.usefixtures("accelerators")
def test_gradients_reach_a_tensor_with_gaps() -> None:
    rows = torch.ones(2, 4, requires_grad=True)
    copy_to(rows[:, -1:], torch.device("virtual:0")).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.tensor([[0.0, 0, 0, 1]] * 2))
