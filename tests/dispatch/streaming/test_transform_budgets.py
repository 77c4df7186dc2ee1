"""Calls under transforms of ``torch.func`` keep to the budgets of devices, or end in one line that says what passes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, get_plan
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.errors import BudgetError

pytestmark = pytest.mark.usefixtures("accelerators")

WIDTH, BUDGET, ROOMY = 64, 120_000, 4_000_000
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))


class Stack(nn.Module):
    """Eight layers; two of them fit the budget beside the slots of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


Transform = Callable[[nn.Module, torch.Tensor], Any]

TRANSFORMS: dict[str, Transform] = {
    "vmap": lambda model, x: torch.vmap(model)(x.expand(16, *x.shape).clone()),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "grad": lambda model, x: torch.func.grad(lambda each: model(each).sum())(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[:1]),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x[:1]),
    "grad of each": lambda model, x: torch.vmap(torch.func.grad(lambda each: model(each).sum()))(x),
}


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_that_would_pass_the_budget_is_one_line(name: str) -> None:
    model = stack()
    gc.collect()
    before = memory_allocated(0)
    dispatch_model(model, max_memory={0: BUDGET, "cpu": "1GB"}, sample_inputs=X)
    assert get_plan(model).streamed
    reset_peak_memory(0)
    line = r"^a call of Stack under a transform of torch.func .* passes the budget of device 0 by .* with "
    with pytest.raises(BudgetError, match=line):
        TRANSFORMS[name](model, X)
    assert max_memory_allocated(0) - before <= BUDGET
    with torch.no_grad():  # nothing of it is left
        assert torch.equal(model(X), stack()(X))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_that_fits_the_budget_runs_within_it(name: str) -> None:
    expected = TRANSFORMS[name](stack(), X)
    model = stack()
    gc.collect()
    before = memory_allocated(0)
    by = {f"blocks.{index}": 0 if index < 2 else "cpu" for index in range(8)}
    dispatch_model(model, by, max_memory={0: ROOMY, "cpu": "1GB"}, sample_inputs=X)
    assert get_plan(model).devices[0].budget == ROOMY
    reset_peak_memory(0)
    found = TRANSFORMS[name](model, X)
    assert max_memory_allocated(0) - before <= ROOMY
    torch.testing.assert_close(found, expected)


def test_weights_are_refused_before_they_would_pass_the_budget() -> None:
    model = stack()
    gc.collect()
    before = memory_allocated(0)
    dispatch_model(model, {"": "cpu"}, main_device=0, max_memory={0: BUDGET, "cpu": "1GB"}, sample_inputs=X[:1])
    reset_peak_memory(0)
    with pytest.raises(BudgetError, match="with a copy of the weights of"):
        torch.func.grad(lambda each: model(each).sum())(X[:1])
    assert max_memory_allocated(0) - before <= BUDGET


def test_the_recorded_peak_of_the_device_is_left_as_it_is() -> None:
    model = dispatch_model(stack(), {"": "cpu"}, main_device=0, max_memory={0: ROOMY, "cpu": "1GB"}, sample_inputs=X)
    earlier = torch.empty(ROOMY, device="virtual:0")
    del earlier
    peak = max_memory_allocated(0)
    TRANSFORMS["jvp"](model, X)
    assert max_memory_allocated(0) == peak >= ROOMY
