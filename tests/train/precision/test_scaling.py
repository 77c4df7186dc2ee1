"""LossScaler: overflowing steps are skipped and said to be."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bigmodel.train.precision.scaling import LossScaler


def make(**options: object) -> LossScaler:
    return LossScaler(torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **options}))


def train(value: float, scaler: LossScaler) -> tuple[nn.Parameter, bool]:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler.scale(parameter.sum() * value).backward()
    return parameter, scaler.step(optimizer)


def test_a_step_is_made_with_unscaled_gradients() -> None:
    parameter, made = train(1.0, make())
    assert made
    assert parameter.item() == 0.5


def test_an_overflowing_step_is_skipped_said_to_be_and_the_scale_lowered(caplog: pytest.LogCaptureFixture) -> None:
    scaler = make()
    parameter, made = train(float("inf"), scaler)
    assert not made
    assert parameter.item() == 1.0
    assert scaler.torch_scaler.get_scale() == 512.0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "this optimizer step is skipped" in caplog.text


def test_the_scale_is_the_same_for_every_optimizer_of_one_backward() -> None:
    scaler = make(growth_interval=1)
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([parameter], lr=0.5) for parameter in (first, second)]
    scaler.scale(first.sum() + second.sum()).backward()
    assert [scaler.step(optimizer) for optimizer in optimizers] == [True, True]
    assert first.item() == second.item() == 0.5  # had the scale grown in between, 0.75
    assert scaler.torch_scaler.get_scale() == 2048.0


def test_unscaling_twice_divides_once() -> None:
    scaler = make()
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert parameter.grad is not None
    assert parameter.grad.item() == 1.0
    assert scaler.step(optimizer)


def test_the_state_is_up_to_date_and_can_be_taken_back() -> None:
    scaler = make()
    train(float("nan"), scaler)
    state = copy.deepcopy(scaler.state_dict())
    assert state["scale"] == 512.0
    other = make()
    other.load_state_dict(state)
    assert other.torch_scaler.get_scale() == 512.0


def test_a_disabled_scaler_steps_as_if_it_were_not_there() -> None:
    parameter, made = train(1.0, make(enabled=False))
    assert made
    assert parameter.item() == 0.5
