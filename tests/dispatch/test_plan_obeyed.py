"""A plan is obeyed: what it predicts is what dispatching by it takes, and nothing beside it decides."""

from __future__ import annotations

import gc

import pytest
import torch
from bigmodel.profile.machine.nominal import nominal_machine
from torch import nn

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model
from bigmodel.plan import Plan, plan
from bigmodel.verify.planned_use import planned_use

from .models import llama

pytestmark = pytest.mark.usefixtures("accelerators")

MEGABYTE = 10**6


def small_llama() -> nn.Module:
    """Eight layers of 2.6 MB, of which four fit 12 MB beside two slots."""
    return llama(8, hidden_size=256, intermediate_size=512, num_key_value_heads=4, vocab_size=512)


def planned(model: nn.Module, **arguments: object) -> Plan:
    budgets = {0: 12 * MEGABYTE, "cpu": 1000 * MEGABYTE}
    shapes = {"context_length": 64, "new_tokens": 2}
    return plan(model, budgets, machine=nominal_machine(), **shapes, **arguments)  # type: ignore[arg-type]


def peak(model: nn.Module, found: Plan, key: int = 0, **arguments: object) -> int:
    """Return the most bytes of an accelerator while `model`, dispatched by the plan, does what it was made for."""
    gc.collect()
    before = memory_allocated(key)
    dispatch_model(model, found, **arguments)  # type: ignore[arg-type]
    reset_peak_memory(key)
    with torch.inference_mode():
        planned_use(model, found).whole()
    return max_memory_allocated(key) - before


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_slots_of_the_plan_are_the_slots_of_the_dispatched_model(slots: int) -> None:
    model = small_llama()
    found = planned(model, slots=slots)
    assert found.slots == slots
    assert peak(model, found) == found.devices[0].total <= 12 * MEGABYTE
