"""Models that run one after another: each is on the device only for its turn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.big_modeling import cpu_offload_with_hook
from bigmodel.hooks import CpuOffload

from ...accelerators import at

pytestmark = pytest.mark.usefixtures("accelerators")
X = torch.ones(1, 3)


def where(model: nn.Module) -> str:
    return str(next(model.parameters()).device)


def test_a_model_goes_to_the_device_when_it_is_called_and_stays_there() -> None:
    model, _ = cpu_offload_with_hook(nn.Linear(3, 3), at(0))
    assert where(model) == "cpu"
    model(X)
    assert where(model) == at(0)


def test_the_next_model_sends_it_back() -> None:
    first, hook = cpu_offload_with_hook(nn.Linear(3, 3), at(0))
    second, _ = cpu_offload_with_hook(nn.Linear(3, 3), at(0), prev_module_hook=hook)
    second(first(X))
    assert (where(first), where(second)) == ("cpu", at(0))


def test_a_second_call_replaces_the_first() -> None:
    model, _ = cpu_offload_with_hook(nn.Linear(3, 3), at(0))
    model(X)
    model, hook = cpu_offload_with_hook(model, at(1))
    assert where(model) == "cpu"
    assert str(model(X).device) == at(1)
    hook.remove()
    assert "forward" not in vars(model)


def test_a_model_without_weights_runs() -> None:
    model, _ = cpu_offload_with_hook(nn.ReLU(), at(0))
    assert str(model(X).device) == at(0)


def test_without_a_device_it_is_the_first_accelerator() -> None:
    assert str(CpuOffload().execution_device) == at(0)
