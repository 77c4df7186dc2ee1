"""A hook runs around a module's forward, and goes without a trace."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, undispatch
from bigmodel.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

from ...accelerators import at


class AddsToInput(ModelHook):
    def __init__(self, number: float) -> None:
        self.number = number

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0] + self.number, *args[1:]), kwargs


class Doubles(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * 2


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 2)


X = torch.ones(1, 3)


def test_it_changes_what_goes_in_and_what_comes_out(layer: nn.Linear) -> None:
    expected = layer(X + 1) * 2
    add_hook_to_module(layer, SequentialHook(AddsToInput(1), Doubles()))
    assert torch.equal(layer(X), expected)


def test_a_second_one_replaces_the_first_unless_it_is_appended(layer: nn.Linear) -> None:
    plain = layer(X)
    add_hook_to_module(layer, Doubles())
    add_hook_to_module(layer, Doubles())
    assert torch.equal(layer(X), plain * 2)
    add_hook_to_module(layer, Doubles(), append=True)
    assert torch.equal(layer(X), plain * 4)
    assert isinstance(layer._hf_hook, SequentialHook)


def test_the_forward_keeps_its_name_and_signature(layer: nn.Linear) -> None:
    add_hook_to_module(layer, Doubles())
    assert layer.forward.__name__ == "forward"
    assert list(inspect.signature(layer.forward).parameters) == ["input"]


def test_removed_it_leaves_no_trace(layer: nn.Linear) -> None:
    before = set(vars(layer))
    add_hook_to_module(layer, Doubles())
    remove_hook_from_module(layer)
    assert set(vars(layer)) == before


def test_without_gradients_if_it_says_so(layer: nn.Linear) -> None:
    hook = ModelHook()
    hook.no_grad = True
    add_hook_to_module(layer, hook)
    assert not layer(X).requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_module_has_a_hook_of_its_own(layer: nn.Linear, copied: Any) -> None:
    add_hook_to_module(layer, AddsToInput(1))
    other = copied(layer)
    expected = layer(X)
    remove_hook_from_module(layer)
    assert torch.equal(other(X), expected)
    nn.init.zeros_(other.weight)
    nn.init.zeros_(other.bias)
    assert other(X).tolist() == [[0, 0]]


def test_a_traced_module_can_be_changed_after_the_hook_is_gone() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2)))
    expected = traced(X)
    add_hook_to_module(traced, Doubles())
    assert torch.equal(traced(X), expected * 2)
    remove_hook_from_module(traced)
    output = next(iter(reversed(traced.graph.nodes)))
    with traced.graph.inserting_before(output):
        output.args = (traced.graph.call_function(torch.neg, (output.args[0],)),)
    traced.recompile()
    assert torch.equal(traced(X), -expected)


@pytest.mark.usefixtures("accelerators")
class TestOnADispatchedModel:
    """A hook and the dispatching of its module are independent of each other, in whatever order they come and go."""

    @pytest.fixture
    def model(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    def test_it_runs_around_the_dispatched_forward(self, model: nn.Sequential) -> None:
        expected = model(X + 1)
        dispatch_model(model, {"": "cpu"}, main_device=at(0))
        add_hook_to_module(model[0], AddsToInput(1))
        assert torch.equal(model(X), expected)

    def test_it_stays_when_dispatching_is_undone(self, model: nn.Sequential) -> None:
        expected = model(X + 1)
        dispatch_model(model, {"": "cpu"}, main_device=at(0))
        add_hook_to_module(model[0], AddsToInput(1))
        undispatch(model)
        assert torch.equal(model(X), expected)
        remove_hook_from_module(model[0])
        assert "forward" not in vars(model[0])

    def test_dispatching_stays_when_it_is_removed(self, model: nn.Sequential) -> None:
        expected = model(X)
        add_hook_to_module(model[0], AddsToInput(1))
        dispatch_model(model, {"": "cpu"}, main_device=at(0))
        remove_hook_from_module(model[0])
        assert torch.equal(model(X), expected)
        assert model.dispatch_stats()

    def test_removing_all_hooks_undoes_dispatching(self, model: nn.Sequential) -> None:
        dispatch_model(model, {"0": at(0), "1": "cpu"})
        remove_hook_from_submodules(model)
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        assert not any("forward" in vars(module) for module in model.modules())
