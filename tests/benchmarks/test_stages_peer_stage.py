"""What a stage on the host takes as long for as a virtual accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.benchmarks.stages import llama
from bigmodel.benchmarks.stages_forward import batch
from bigmodel.benchmarks.stages_peer_stage import at_set_speed
from bigmodel.devices import virtual
from bigmodel.devices.virtual.clock import ComputeClock


@pytest.mark.virtual_only("accelerators of a set speed")
def test_the_host_is_held_to_the_products_of_a_virtual_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[Any, Any]] = []

    def compute(clock: ComputeClock, ready: float, operands: tuple[Any, Any]) -> float:
        assert clock.flops == 1e12
        products.append(tuple(operand.shape for operand in operands))
        return ready

    monkeypatch.setattr(ComputeClock, "compute", compute)
    model, ids = llama(2, 64, 128), batch(2)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(
            at_set_speed(model, 1e12)(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4
        )
        on_host, products = products, []
        virtual.enable(1, flops=1e12)
        model.to("virtual:0")(ids.to("virtual:0"), use_cache=False)
    assert on_host == products != []


def test_a_stage_hands_on_its_results_when_the_accelerator_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ComputeClock, "compute", lambda clock, ready, operands: max(ready, 100.0) + 2 / clock.flops)
    monkeypatch.setattr("bigmodel.benchmarks.stages_peer_stage.sleep_until", waits.append)
    linear = torch.nn.Linear(2, 3)
    x = torch.ones(1, 2)
    with torch.no_grad():
        assert torch.equal(at_set_speed(lambda: linear(linear(x)[:, :2]), 0.5)(), linear(linear(x)[:, :2]))
    assert waits == [108.0]
