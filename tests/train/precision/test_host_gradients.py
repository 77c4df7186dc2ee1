"""Scaled gradients of offloaded weights are unscaled on the host by a scale that has arrived there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.train.precision.host_gradients import HostGradScaler
from bigmodel.train.strategies.base import StrategySettings, make_strategy
from bigmodel.train.strategies.sharded.gradients import ShardedGradScaler
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


@pytest.mark.parametrize("arrived", ["scale", "flag"])
@pytest.mark.parametrize("make", [lambda device: HostGradScaler(device.type), ShardedGradScaler])
def test_neither_the_scale_nor_the_flag_is_used_before_it_has_arrived(make: Any, arrived: str) -> None:
    """Where both cross, waiting for the second waits for the first, too: so here only one of them crosses."""
    device = torch.device(at(0))
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 1024.0)
    scale, flag = torch.full((), 1 / 1024), torch.zeros(())
    crossing = {"scale": scale.to(device), "flag": flag.to(device)} | {arrived: {"scale": scale, "flag": flag}[arrived]}
    flags = make(device)._unscale_grads_(
        torch.optim.SGD([weight], lr=1.0), crossing["scale"], crossing["flag"], allow_fp16=False
    )
    assert weight.grad.tolist() == [1.0] * 4
    assert {where: flag.tolist() for where, flag in flags.items()} == {weight.device: 0.0}
