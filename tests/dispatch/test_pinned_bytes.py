"""Pinned memory takes the bytes of the plan: for weights, while a checkpoint is loaded, and while gradients come to the
host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import save_model
from bigmodel.devices import virtual
from bigmodel.devices.pinned import PAGE, is_pinned
from bigmodel.dispatch import dispatch_model, load_checkpoint_and_dispatch, undispatch
from bigmodel.limits import HOST_ALIGNMENT
from bigmodel.plan import Plan, plan, plan_training
from bigmodel.profile import profile_model
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly

from ..examples import alike
from .mixtures import mixtral
from .models import llama

pytestmark = pytest.mark.usefixtures("accelerators")

MEGABYTE = 10**6


class Pinned:
    """The pinned memory that is taken from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._before = virtual.pinned_memory.reserved
        self._allocate = virtual.pinned_memory.empty
        self.peak = 0
        monkeypatch.setattr(virtual.pinned_memory, "empty", self._empty)

    def _empty(self, nbytes: int, rounded: bool = True) -> torch.Tensor:
        found = self._allocate(nbytes, rounded)
        self.peak = max(self.peak, self.now)
        return found

    @property
    def now(self) -> int:
        """Bytes that are pinned, as they are rounded."""
        return virtual.pinned_memory.reserved - self._before


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    return Pinned(monkeypatch)


def small_llama() -> nn.Module:
    return llama(6, hidden_size=256, intermediate_size=512, num_key_value_heads=4, vocab_size=512)


def planned(budgets: dict[Any, int]) -> Plan:
    return plan(profile_model(small_llama(), context_length=16, new_tokens=2, device_type="virtual"), budgets)


@pytest.mark.slow
@alike("make", [small_llama, mixtral], first=1)
def test_streamed_weights_pin_their_bytes_and_not_up_to_twice_as_many(make: Any, pinned: Pinned) -> None:
    weights = sum(each.nbytes for each in make().parameters())
    found = plan(
        profile_model(make(), context_length=16, new_tokens=2, device_type="virtual"),
        {0: int(0.6 * weights), "cpu": 10 * weights},
    )
    assert found.streamed
    model = dispatch_model(make(), found)
    parameters = [each for each in model.parameters() if is_pinned(each)]
    asked = sum(each.nbytes for each in parameters)
    assert 0 < asked <= pinned.now < asked + (PAGE + HOST_ALIGNMENT) * len(parameters)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.slow
def test_loading_to_accelerators_pins_the_planned_bytes_and_gives_them_back(
    devices: int, tmp_path: Path, pinned: Pinned
) -> None:
    save_model(small_llama(), tmp_path)
    found = planned({**dict.fromkeys(range(devices), 24 * MEGABYTE // devices), "cpu": 100 * MEGABYTE})
    assert not found.streamed
    used = [key for key, device in found.devices.items() if device.weights and key != "cpu"]
    assert len(used) == devices
    model = load_checkpoint_and_dispatch(small_llama(), tmp_path, found)
    assert pinned.peak == devices * found.upload_bytes > 0
    assert pinned.now == 0
    expected = small_llama().state_dict()
    undispatch(model)
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_loading_pins_no_more_than_weights_leave_of_the_hosts_budget(tmp_path: Path, pinned: Pinned) -> None:
    save_model(small_llama(), tmp_path)
    roomy = planned({0: 12 * MEGABYTE, "cpu": 100 * MEGABYTE})
    held = roomy.devices["cpu"].total
    tight = planned({0: 12 * MEGABYTE, "cpu": held + 10_000})
    assert roomy.upload_bytes > tight.upload_bytes > 0
    load_checkpoint_and_dispatch(small_llama(), tmp_path, replace(tight, pinned_memory=0))
    assert pinned.peak == tight.upload_bytes <= 10_000


@pytest.mark.slow
def test_nothing_is_pinned_for_loading_where_nothing_may_be(tmp_path: Path, pinned: Pinned) -> None:
    save_model(small_llama(), tmp_path)
    profile = profile_model(small_llama(), context_length=16, new_tokens=2, device_type="virtual")
    found = plan(profile, {0: 12 * MEGABYTE, "cpu": 100 * MEGABYTE}, pinned_memory=0)
    assert (found.upload_bytes, found.gradient_bytes) == (0, 0)
    model = load_checkpoint_and_dispatch(small_llama(), tmp_path, found)
    assert pinned.peak == 0
    model.train()(torch.arange(16).view(1, 16).to("virtual:0")).logits.sum().backward()
    assert pinned.peak == 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("make", [mixtral, small_llama])
def test_gradients_come_through_the_planned_bytes_which_count_on_the_host(make: Any, pinned: Pinned) -> None:
    model = make()
    weights = sum(each.nbytes for each in model.parameters())
    found = plan_training(model, {0: int(1.7 * weights), "cpu": 100 * weights}, 1, 16)
    assert found.streamed
    blocks = [sum(weight.nbytes for weight in model.get_submodule(part.name).parameters()) for part in found.streamed]
    assert max(blocks) < found.gradient_bytes < 2 * max(blocks) + 2**16
    assert found.devices["cpu"].slots == found.gradient_bytes
    dispatch_model(model.train(), replace(found, pinned_memory=0))
    for _ in range(2):
        ids = torch.arange(16).view(1, 16).to("virtual:0")
        model(input_ids=ids, labels=ids).loss.backward()
    assert pinned.peak == found.gradient_bytes
    assert pinned.now == 0
