"""`AlignDevicesHook` brings inputs and weights to one device; the weights stay real."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

from ...accelerators import at, held

pytestmark = pytest.mark.usefixtures("accelerators")
X = torch.ones(2, 3)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_weights_and_inputs_go_to_the_execution_device() -> None:
    layer = nn.Linear(3, 2)
    expected = layer(X)
    add_hook_to_module(layer, AlignDevicesHook(at(0)))
    assert str(layer.weight.device) == at(0)
    assert torch.equal(layer(X).cpu(), expected)


def test_outputs_may_return_to_the_inputs_device() -> None:
    layer = nn.Linear(3, 2)
    add_hook_to_module(layer, AlignDevicesHook(at(0), io_same_device=True))
    assert layer(X).device.type == "cpu"


def test_offloaded_weights_are_the_same_parameters_on_the_host() -> None:
    layer = nn.Linear(3, 2)
    weight, expected = layer.weight, layer(X)
    add_hook_to_module(layer, AlignDevicesHook(at(0), offload=True))
    assert torch.equal(layer(X).cpu(), expected)
    assert layer.weight is weight
    assert held(0) == 0


def test_gradients_reach_offloaded_weights() -> None:
    layer = nn.Linear(3, 2)
    add_hook_to_module(layer, AlignDevicesHook(at(0), offload=True))
    layer(X).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2, 2, 2], [2, 2, 2]]


def test_offloaded_buffers_keep_what_forward_writes_into_them() -> None:
    hooked, plain = net(), net()
    hooked.load_state_dict(plain.state_dict())
    plain(X)
    add_hook_to_module(hooked, AlignDevicesHook(at(0), offload=True, offload_buffers=True, place_submodules=True))
    hooked(X)
    assert hooked[1].running_mean.device.type == "cpu"
    assert torch.equal(hooked[1].running_mean, plain[1].running_mean)


def test_buffers_that_are_not_offloaded_stay_on_the_execution_device() -> None:
    norm = nn.BatchNorm1d(3)
    add_hook_to_module(norm, AlignDevicesHook(at(0), offload=True))
    assert str(norm.running_mean.device) == at(0)
    assert norm.weight.device.type == "cpu"


def test_weights_may_come_from_a_map() -> None:
    layer = nn.Linear(3, 2)
    values = {"weight": torch.zeros(2, 3), "bias": torch.ones(2)}
    add_hook_to_module(layer.to("meta"), AlignDevicesHook(at(0), offload=True, weights_map=values))
    assert layer(X).tolist() == [[1, 1], [1, 1]]
    assert not layer.weight.is_meta


def test_a_map_that_replaces_it_between_the_calls_has_the_new_values() -> None:
    layer = nn.Linear(3, 2)
    hook = AlignDevicesHook(at(0), offload=True)
    add_hook_to_module(layer, hook)
    hook.pre_forward(layer)
    assert str(layer.weight.device) == at(0)
    hook.weights_map = {"weight": torch.zeros(2, 3), "bias": torch.ones(2)}
    hook.post_forward(layer, None)
    assert layer.weight.device.type == "cpu"
    assert layer.weight.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_removing_it_takes_weights_back_to_their_device() -> None:
    layer = nn.Linear(3, 2).to(at(1))
    add_hook_to_module(layer, AlignDevicesHook(at(0), offload=True))
    assert layer.weight.device.type == "cpu"
    remove_hook_from_module(layer)
    assert str(layer.weight.device) == at(1)


def test_recurrent_layers_see_the_copies() -> None:
    layer = nn.LSTM(3, 4)
    expected = layer(X)[0]
    add_hook_to_module(layer, AlignDevicesHook(at(0), offload=True))
    assert torch.allclose(layer(X)[0].cpu(), expected)
