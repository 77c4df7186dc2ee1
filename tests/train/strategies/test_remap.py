"""Optimizers that were made before the model was sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train.strategies.remap import ParameterMap, owners


def replaced(model: nn.Module) -> None:
    """What sharding does: every parameter becomes another object."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().clone())


def test_an_optimizer_follows_the_model_whenever_it_is_given() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    known = ParameterMap()
    known.remember(model)
    replaced(model)
    known.learn(model)
    known.repoint(optimizer)
    known.repoint(optimizer)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert optimizer.param_groups[1]["params"][0] is model.bias
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_parameters_of_other_models_stay() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    known = ParameterMap()
    known.remember(model)
    replaced(model)
    known.learn(model)
    known.repoint(optimizer)
    assert optimizer.param_groups[0]["params"][0] is other.weight


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    known = ParameterMap()
    known.remember(model)
    replaced(model)
    known.learn(model)
    with pytest.raises(TrainError, match=r"call accelerator\.prepare before the first step"):
        known.repoint(optimizer)


def test_a_models_optimizer_is_recognised() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert owners(model, [model.bias])
    assert not owners(model, other.parameters())
