"""Memory of micro-batches that are in flight: what is measured on each accelerator stays within the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.devices.caching import memory_peaks
from bigmodel.dispatch import dispatch_model
from bigmodel.plan import Plan, plan
from bigmodel.plan.memory.micro_batches import in_flight
from tests.marks import pairwise
from tests.server.tiny import tiny_model

from ...examples import alike

pytestmark = [pytest.mark.virtual_only("several accelerators"), pytest.mark.usefixtures("accelerators")]

ROWS, TOKENS = 8, 48


def model() -> Any:
    return tiny_model(layers=4, hidden_size=64, intermediate_size=1024)


def planned(size: int | None, accelerators: int, more: int = 2**26) -> Plan:
    made = model()
    weights = sum(parameter.nbytes for parameter in made.parameters())
    budgets: dict[Any, int] = {**dict.fromkeys(range(accelerators), weights + more), "cpu": 2**40}
    shape: dict[str, Any] = {"batch_size": ROWS, "context_length": TOKENS + 1, "new_tokens": 1}
    return plan(made, budgets, "balanced", **shape, micro_batch_size=size)


def forwards(dispatched: Any) -> None:
    batch = torch.randint(0, 200, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1)).to("virtual:0")
    mask = torch.ones_like(batch)
    mask[3, :5] = 0
    with torch.no_grad():
        for more in ({}, {"use_cache": False}, {"attention_mask": mask}):
            dispatched(batch, **more)


def test_there_is_one_more_than_there_are_accelerators() -> None:
    assert in_flight(8, 1, 2) == 3
    assert in_flight(8, 3, 4) == 3
    assert in_flight(8, 8, 4) == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("size", "count", "late"), pairwise([1, 3], [2, 4], [False, True]))
def test_peaks_stay_within_the_plan(size: int, count: int, late: bool) -> None:
    virtual.enable(count, strict=late, late_compute=late)
    made = planned(size, count)
    assert made.micro_batch_size == size
    others = [memory_allocated(f"virtual:{index}") for index in range(count)]
    placed = dispatch_model(model(), made)
    for index in range(count):
        reset_peak_memory(f"virtual:{index}")
    forwards(placed)
    for index in range(count):
        device = made.devices[index]
        assert max_memory_allocated(f"virtual:{index}") - others[index] <= device.total
        assert device.budget is not None
        assert device.total <= device.budget


@pytest.mark.slow
def test_several_large_ones_take_more_than_the_batch_whole() -> None:
    whole = planned(None, 2).devices
    assert all(planned(4, 2).devices[index].activations > whole[index].activations for index in (0, 1))


@pytest.mark.slow
@alike("size", [4, 1], first=1)
def test_what_allocators_reserve_stays_within_the_plan(size: int) -> None:
    virtual.enable(2, caching=virtual.Caching(workspace=4 << 20), strict=True)
    made = planned(size, 2, 2**28)
    assert made.micro_batch_size == size
    placed = dispatch_model(model(), made)
    forwards(placed)
    for index in range(2):
        device = made.devices[index]
        assert memory_peaks(index).reserved <= device.total
        assert device.budget is not None
        assert device.total <= device.budget
        assert device.workspace >= (in_flight(ROWS, size, 2) + 1) * (4 << 20)


@pytest.mark.slow
def test_without_room_for_several_less_is_resident() -> None:
    roomy, tight = planned(4, 2), None
    need = max(device.activations + device.kv_cache for device in roomy.devices.values())
    weights = sum(parameter.nbytes for parameter in model().parameters())
    tight = planned(4, 2, need - weights // 2 + 2**14)
    for key, device in tight.devices.items():
        assert device.budget is None or device.total <= device.budget, key
