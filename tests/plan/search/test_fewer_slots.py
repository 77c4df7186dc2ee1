"""`with_slots`: fewer slots where the usual number leaves all accelerators idle, by plans of a chain of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.errors import BudgetError
from bigmodel.plan import Plan, make_plan
from bigmodel.plan.search.fewer_slots import ONE_SLOT

from ...accelerators import at

pytestmark = pytest.mark.usefixtures("accelerators")

LAYER = 4 * 64 * 65
"""Bytes of a layer."""


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def planned(**budgets: int) -> Plan:
    keys: dict[Any, int] = {0 if key == "accelerator" else key: size for key, size in budgets.items()}
    return make_plan(chain(), keys, sample_inputs=torch.ones(1, 64))


@pytest.mark.parametrize(("room", "slots"), [(1.5, 1), (2.5, 2)])
def test_as_many_slots_as_an_accelerator_has_memory_for_are_planned(room: float, slots: int) -> None:
    plan = planned(accelerator=int(room * LAYER), cpu=2**30)
    assert plan.slots == slots
    assert {part.runs_on for part in plan.parts} == {0}
    assert (ONE_SLOT in plan.notes) == (slots == 1)
    assert ("1 slot for streamed parts" in plan.explain()) == (slots == 1)


def test_the_host_runs_what_one_slot_cannot_hold() -> None:
    plan = planned(accelerator=LAYER // 2, cpu=2**30)
    assert {part.runs_on for part in plan.parts} == {"cpu"}
    assert ONE_SLOT not in plan.notes


def test_the_budget_that_would_do_is_the_one_for_one_slot() -> None:
    with pytest.raises(BudgetError) as raised:
        planned(accelerator=LAYER // 2, cpu=5 * LAYER, disk=0)
    least = int(str(raised.value).partition("would do: 0: ")[2].partition("(")[2].partition(" bytes")[0])
    assert planned(accelerator=least, cpu=5 * LAYER, disk=0).slots == 1
    with pytest.raises(BudgetError):
        planned(accelerator=least - 1, cpu=5 * LAYER, disk=0)


def test_one_slot_gives_the_bits_of_the_resident_model_within_the_plan() -> None:
    plan = planned(accelerator=int(1.5 * LAYER), cpu=2**30)
    x = torch.ones(1, 64, device=at(0))
    with torch.no_grad():
        expected = chain().to(at(0))(x).cpu()
        model = dispatch_model(chain(), plan)
        held = memory_allocated(0) - x.nbytes
        reset_peak_memory(0)
        assert torch.equal(model(x).cpu(), expected)
    assert max_memory_allocated(0) - held <= plan.devices[0].activations + plan.devices[0].slots
