"""Gradient norms and loss scaling over shards: an overflow on any rank counts on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bigmodel.train import PartialState
from bigmodel.train.strategies.sharded.gradients import ShardedGradScaler, clip_grad_norm
from tests.train.multiprocess import on_ranks

CPU = torch.device("cpu")


def parameters(seed: int, scale: float) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(3, 4), (5,), (0,), (2,)]]
    for parameter in made[:3]:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    return made


@given(
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    largest=st.sampled_from([0.1, 1.0, 10.0]),
    kind=st.sampled_from([1.0, 2.0, 3.0, float("inf")]),
)
def test_it_is_torchs_clipping_where_nothing_is_sharded(seed: int, scale: float, largest: float, kind: float) -> None:
    ours, theirs = parameters(seed, scale), parameters(seed, scale)
    found = clip_grad_norm(ours, largest, kind, CPU)
    full = [p for p in theirs if p.grad is not None and p.grad.numel()]
    expected = torch.nn.utils.clip_grad_norm_(full, largest, norm_type=kind)
    torch.testing.assert_close(found, expected)
    for a, b in zip(ours, theirs, strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_no_gradients_have_no_norm() -> None:
    assert clip_grad_norm([torch.nn.Parameter(torch.ones(2))], 1.0, 2.0, CPU) == pytest.approx(0.0)


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
