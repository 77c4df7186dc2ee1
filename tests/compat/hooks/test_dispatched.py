"""A dispatched model shows hooks: where its modules run, and copies of weights for code that uses these elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bigmodel.big_modeling import cpu_offload, dispatch_model
from bigmodel.dispatch import undispatch
from bigmodel.dispatch.attach.mark import is_dispatched
from bigmodel.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules

from ...accelerators import at

pytestmark = pytest.mark.usefixtures("accelerators")
X = torch.ones(1, 3)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def test_they_say_where_a_module_runs(model: nn.Sequential) -> None:
    dispatch_model(model, {"0": at(1), "1": "cpu"}, main_device=at(0))
    hooks = [model._hf_hook, model[0]._hf_hook, model[1]._hf_hook]
    assert all(isinstance(hook, AlignDevicesHook) for hook in hooks)
    assert [str(hook.execution_device) for hook in hooks] == [at(0), at(1), at(0)]


def test_one_has_outputs_return_to_the_inputs_device(model: nn.Sequential) -> None:
    dispatch_model(model, {"0": "cpu", "1": "cpu"}, main_device=at(0))
    assert str(model[0](X).device) == at(0)
    model[0]._hf_hook.io_same_device = True
    assert model[0](X).device.type == "cpu"


def test_one_brings_copies_of_the_weights_and_what_is_written_into_them_stays(model: nn.Sequential) -> None:
    cpu_offload(model, at(0))
    layer, weight = model[0], model[0].weight
    layer._hf_hook.pre_forward(layer)
    assert str(layer.weight.device) == at(0)
    with torch.no_grad():
        layer.weight.zero_()
    layer._hf_hook.post_forward(layer, None)
    assert layer.weight is weight
    assert weight.abs().sum() == 0
    assert torch.equal(model[0](X).cpu(), layer.bias.detach().cpu()[None])


def test_they_go_when_dispatching_is_undone(model: nn.Sequential) -> None:
    cpu_offload(model, at(0))
    undispatch(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_copies_of_parts_have_none_and_those_of_models_their_own(model: nn.Sequential) -> None:
    dispatch_model(model, {"0": "cpu", "1": "cpu"}, main_device=at(0))
    add_hook_to_module(model[1], ModelHook(), append=True)
    assert not hasattr(copy.deepcopy(model[0]), "_hf_hook")
    assert torch.equal(copy.deepcopy(model[1])(X), undispatch(copy.deepcopy(model))[1](X))
    copied = copy.deepcopy(model)
    copied[0]._hf_hook.io_same_device = True
    assert (copied[0](X).device.type, str(model[0](X).device)) == ("cpu", at(0))


def test_removing_hooks_gives_the_plain_model(model: nn.Sequential) -> None:
    expected = model(X)
    cpu_offload(model, at(0))
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), expected)
    assert not is_dispatched(model)


def test_removing_hooks_leaves_the_device_map_as_accelerate_does(model: nn.Sequential) -> None:
    places = {"0": at(0), "1": "cpu"}
    dispatch_model(model, places)
    remove_hook_from_submodules(model)
    assert model.hf_device_map == places
    dispatch_model(model, {"": "cpu"})
    assert model.hf_device_map == {"": "cpu"}
    undispatch(model)
    assert not hasattr(model, "hf_device_map")
