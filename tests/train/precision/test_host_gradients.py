"""Scaled gradients of offloaded weights are unscaled on the host by a scale that has arrived there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.train.strategies.base import StrategySettings, make_strategy
from bigmodel.train.types import DistributedType
from tests.accelerators import at

pytestmark = pytest.mark.usefixtures("every_accelerator")


@pytest.mark.parametrize("overflow", [False, True])
def test_gradients_on_the_host_and_on_the_device_are_unscaled(overflow: bool) -> None:
    device = torch.device(at(0))
    scaler = make_strategy(DistributedType.NO, StrategySettings(device)).make_grad_scaler(init_scale=1024.0)
    weights = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, device=device))]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaler.scale(torch.ones((), device=device))
    for weight in weights:
        weight.grad = torch.full_like(weight, float("inf") if overflow else 1024.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [weight.tolist() for weight in weights] == [[0.0 if overflow else -1.0] * 4] * 2
    assert scaler.get_scale() == (512.0 if overflow else 1024.0)
