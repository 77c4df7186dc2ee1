"""Loss scaling over shards: an overflow anywhere is an overflow everywhere."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bigmodel.train import PartialState
from bigmodel.train.strategies.sharded_scaler import ShardedGradScaler
from tests.train.multiprocess import on_ranks

CPU = torch.device("cpu")


def sharded() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A parameter of which each process has two elements, and what changes it."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def scaled_step(gradient: list[float]) -> tuple[list[float], float, bool]:
    """Scale by 8 and step with gradients of which this process has a half; return weights, scale, any overflow."""
    parameter, optimizer = sharded()
    scaler = ShardedGradScaler(CPU, init_scale=8.0)
    scaler.scale(torch.ones(()))
    parameter.grad = distribute_tensor(torch.tensor(gradient) * 8, parameter.device_mesh, [Shard(0)])
    scaler.unscale_(optimizer)
    overflowed = any(flag.item() for flag in scaler._found_inf_per_device(optimizer).values())
    scaler.step(optimizer)
    scaler.update()
    return parameter.detach().full_tensor().tolist(), scaler.get_scale(), overflowed


@on_ranks
def test_gradients_are_divided_by_the_scale() -> None:
    assert scaled_step([1.0, 2.0, 3.0, 4.0]) == ([-1.0, -2.0, -3.0, -4.0], 8.0, False)


@on_ranks
def test_an_overflow_on_one_process_skips_the_step_on_both() -> None:
    assert scaled_step([1.0, 2.0, 3.0, float("inf")]) == ([0.0] * 4, 4.0, True)


@on_ranks
def test_a_process_without_gradients_takes_part() -> None:
    parameter, optimizer = sharded()
    scaler = ShardedGradScaler(CPU, init_scale=8.0)
    scaler.scale(torch.ones(()))
    if PartialState().process_index == 0:
        parameter.grad = distribute_tensor(
            torch.full((4,), float("nan")), parameter.device_mesh, [Shard(0)], src_data_rank=None
        )
    scaler.unscale_(optimizer)
    assert all(flag.item() for flag in scaler._found_inf_per_device(optimizer).values())
