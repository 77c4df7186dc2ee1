from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from bigmodel.plan.unit_cost import UnitCost, device_name
from bigmodel.profile import Profile, profile_model

from ..profile.models import tiny_llama
from .machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")


def profile(**changes: Any) -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=2), context_length=32, new_tokens=2, **changes)


def block_of(of: Profile) -> int:
    return next(index for index, unit in enumerate(of.units) if unit.is_block)


def test_a_slower_device_takes_longer_and_a_prompt_longer_than_a_step() -> None:
    of = profile()
    cost, block = UnitCost(of, machine(accelerator=1e-10, host=1e-8)), block_of(of)
    assert cost.compute(1, block, 0) < cost.compute(1, block, "cpu") < cost.compute(0, block, "cpu")


def test_only_what_comes_over_the_link_is_fetched() -> None:
    of = profile()
    cost, block = UnitCost(of, machine(link=1e6)), block_of(of)
    assert cost.fetch(0, block, (0, 0), 0) == cost.fetch(0, block, ("cpu", "cpu"), 0) == 0.0
    assert cost.fetch(0, block, ("cpu", 0), 0) == pytest.approx(of.units[block].weights / 1e6, rel=0.01)


def test_files_that_the_host_cannot_keep_come_at_the_disks_own_rate() -> None:
    of = profile()
    cost = UnitCost(of, machine())
    assert cost.disk_rate(1000) == cost.machine.disk_warm
    assert cost.disk_rate(cost.machine.memory_bytes) == cost.machine.disk_cold


def test_inputs_cross_from_accelerator_to_host_and_back() -> None:
    of = profile()
    cost, block = UnitCost(of, machine(link=1e6)), block_of(of)
    assert cost.crossing(0, block, 0, "cpu") > 0
    assert cost.crossing(0, block, 0, 1) > cost.crossing(0, block, 0, "cpu")


def test_asking_for_experts_takes_as_many_calls_as_are_chosen_take() -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    of = profile_model(MixtralForCausalLM(config), context_length=32, new_tokens=2)
    cost = UnitCost(of, replace(machine(), python_call=1e-6))
    block = next(index for index, unit in enumerate(of.units) if unit.experts)
    assert 1e-4 < cost.asking(1, block) < cost.asking(0, block)
    assert cost.asking(1, 0) == 0.0


def test_host_and_disk_compute_on_the_host() -> None:
    assert device_name("disk") == device_name("cpu") == "cpu"
    assert device_name(1) == "virtual:1"
