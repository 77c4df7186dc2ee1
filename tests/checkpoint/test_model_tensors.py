from __future__ import annotations

import torch
from torch import nn

from bigmodel.checkpoint.model_tensors import find_model_tensors, parameter_like
from tests.checkpoint.helpers import Tied


class Tagged(nn.Parameter):
    """A parameter class whose constructor wants more than other parameters do."""

    def __new__(cls, data: torch.Tensor, tag: str) -> Tagged:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.tag = tag
        return self


def test_every_tensor_is_found_once_with_all_its_names() -> None:
    targets = find_model_tensors(Tied())
    assert {target.name: target.names for target in targets if len(target.names) > 1} == {
        "embed.weight": ["embed.weight", "head.weight"]
    }
    assert {target.name for target in targets if not target.persistent} == {"position"}
    assert {target.name for target in targets if target.is_buffer} == {
        "position",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert len(targets) == 1 + 1 + 4 + 5 + 1


def test_a_shared_module_lends_its_tensors_all_its_names() -> None:
    layer = nn.Linear(2, 2, bias=False)
    (target,) = find_model_tensors(nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)}))
    assert target.names == ["a.weight", "b.0.weight"]


def test_filling_a_slot_fills_every_place_with_one_parameter() -> None:
    model = Tied()
    target = next(target for target in find_model_tensors(model) if target.name == "embed.weight")
    target.fill(torch.ones(8, 4))
    assert model.embed.weight is model.head.weight
    assert isinstance(model.head.weight, nn.Parameter)
    assert torch.equal(model.head.weight, torch.ones(8, 4))
    assert target.tensor is model.head.weight


def test_a_buffer_is_filled_with_a_plain_tensor() -> None:
    model = Tied()
    value = torch.zeros(4)
    next(target for target in find_model_tensors(model) if target.name == "norm.running_var").fill(value)
    assert model.norm.running_var is value


def test_slots_can_be_merged_and_split() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    first, second, third = find_model_tensors(model)
    first.merge(second)
    first.merge(third)
    apart = first.split(["b.weight"])
    first.fill(torch.ones(2, 2))
    apart.fill(torch.zeros(2, 2))
    assert model["a"].weight is model["c"].weight
    assert model["b"].weight is not model["a"].weight
    assert model["b"].weight.sum() == 0


def test_a_new_parameter_keeps_class_attributes_and_requires_grad() -> None:
    old = Tagged(torch.zeros(2), tag="kept")
    new = parameter_like(old, torch.ones(2))
    assert type(new) is Tagged
    assert new.tag == "kept"
    assert not new.requires_grad

    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    frozen.note = "x"
    assert parameter_like(frozen, torch.ones(2)).note == "x"
    assert not parameter_like(frozen, torch.ones(2)).requires_grad
    assert parameter_like(nn.Parameter(torch.zeros(2)), torch.ones(2)).requires_grad


def test_a_parameter_of_integers_wants_no_gradient() -> None:
    assert not parameter_like(nn.Parameter(torch.zeros(2)), torch.ones(2, dtype=torch.int8)).requires_grad


def test_the_value_is_used_as_it_is() -> None:
    value = torch.ones(3)
    assert parameter_like(nn.Parameter(torch.zeros(3)), value).data_ptr() == value.data_ptr()
