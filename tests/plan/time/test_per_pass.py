"""Parts that are streamed for prompts and computed on the host in steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigmodel.errors import BudgetError
from bigmodel.plan import Plan, plan
from bigmodel.plan.memory.assignment import Assignment, memory_usage
from bigmodel.plan.time.cost import CostModel
from bigmodel.plan.time.per_pass import streamed_from
from bigmodel.plan.time.unit_cost import UnitCost
from bigmodel.profile import Profile, profile_model
from tests.examples import alike, few

from ...profile.models import tiny_llama
from ..machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")

MODEL = tiny_llama(num_hidden_layers=4, hidden_size=128, intermediate_size=256)
MACHINE = machine(link=1e8, host=4e-9)
"""For each weight the link takes 40 ns. The host takes 4 for a row, and 16 times as much for 256 of them."""


@cache
def profile(context: int = 256) -> Profile:
    return profile_model(MODEL, context_length=context, new_tokens=2, device_type="virtual")


@cache
def planned(of: Profile, offload: str = "auto", link: float = 1e8, host: float = 4e-9, **options: Any) -> Plan:
    """Return a plan for prompt and steps with a budget of half the weights."""
    budget: dict[Any, Any] = {0: of.weights // 2 + of.activations + sum(of.kv_cache), "cpu": "1GB"}
    return plan(of, budget, objective="throughput", offload=offload, machine=machine(link, host=host), **options)


def seconds(found: Plan) -> tuple[float, float]:
    assert found.prediction is not None
    assert found.prediction.prefill is not None
    return found.prediction.prefill, found.prediction.token


def assignment_of(found: Plan, of: Profile) -> Assignment:
    """Return the assignment that a plan describes."""
    storage = tuple(found.device_map.get(unit.name, found.main_device) for unit in of.units)
    execution = tuple(found.execution.get(unit.name, found.main_device) for unit in of.units)
    below = {i: found.computed_below[unit.name] for i, unit in enumerate(of.units) if unit.name in found.computed_below}
    return Assignment(
        storage,
        execution,
        found.main_device,
        found.slots,
        found.slot_bytes,
        staging_bytes=found.staging_bytes,
        computed_below=below,
    )


@pytest.mark.slow
def test_prompt_and_step_each_take_the_time_of_the_cheaper_form() -> None:
    of = profile()
    streamed, computed, auto = (planned(of, offload=offload) for offload in ("stream", "compute", "auto"))
    assert auto.computed_below
    assert seconds(streamed)[0] < seconds(computed)[0]
    assert seconds(computed)[1] < seconds(streamed)[1]
    assert seconds(auto)[0] < (seconds(computed)[0] + seconds(streamed)[0]) / 2
    assert seconds(auto)[1] < (seconds(computed)[1] + seconds(streamed)[1]) / 2
    cost, both = CostModel(of, MACHINE), assignment_of(auto, of)
    assert seconds(auto) == (cost.seconds(0, both).seconds, cost.seconds(1, both).seconds)
    assert cost.seconds(1, both).link < cost.seconds(0, both).link / 10


@pytest.mark.slow
def test_the_threshold_lies_between_a_step_and_the_prompt() -> None:
    for tokens in planned(profile()).computed_below.values():
        assert 1 < tokens <= 254


@pytest.mark.slow
def test_the_threshold_grows_as_the_link_becomes_slower() -> None:
    of = profile()
    layer = next(index for index, unit in enumerate(of.units) if unit.is_block)
    thresholds = [streamed_from(UnitCost(of, machine(link=link, host=4e-9)), layer, 0) for link in (2e8, 1e8, 5e7)]
    assert None not in thresholds
    assert thresholds == sorted(set(thresholds))


@pytest.mark.slow
@alike(("link", "host"), [(1e10, 1e-8), (1e5, 1e-10)], first=1)
def test_prompt_and_step_run_alike_if_one_form_is_always_faster(link: float, host: float) -> None:
    assert planned(profile(), link=link, host=host).computed_below == {}


@pytest.mark.slow
@alike("options", [{"offload": "stream"}, {"per_pass": False}], first=1)
def test_per_pass_choices_are_made_only_if_allowed(options: dict[str, Any]) -> None:
    assert planned(profile(), **options).computed_below == {}


@pytest.mark.slow
def test_quantised_weights_are_not_computed_on_the_host() -> None:
    assert planned(profile(), offload_dtype="int8").computed_below == {}


@pytest.mark.slow
def test_the_plan_states_both_forms_also_in_json() -> None:
    found = planned(profile())
    tokens = next(iter(found.computed_below.values()))
    assert f"cpu below {tokens} tokens" in str(found)
    assert "streamed from RAM for a prompt, computed on the CPU in steps" in found.explain()
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.slow
def test_the_kv_cache_counts_on_the_devices_of_prompt_and_step() -> None:
    of = profile()
    found = planned(of)
    moved = sum(nbytes for unit, nbytes in zip(of.units, of.kv_cache) if unit.name in found.computed_below)
    computed = sum(nbytes for unit, nbytes in zip(of.units, of.kv_cache) if found.execution.get(unit.name) == "cpu")
    assert found.devices["cpu"].kv_cache == moved + computed
    assert moved > 0
    assert found.devices[0].kv_cache == sum(of.kv_cache) - computed
    assert found.devices[0].slots == 2 * max(unit.slot_bytes() for unit in of.units if unit.is_block)


@pytest.mark.slow
def test_a_choice_of_forms_is_no_slower_than_one_where_a_placement_is_over_by_little() -> None:
    model = tiny_llama(num_hidden_layers=14, hidden_size=128, intermediate_size=256)
    of = profile_model(model, context_length=80, new_tokens=16, device_type="virtual", all_logits=False)
    budgets: dict[int | str, Any] = {0: (of.weights + of.activations + sum(of.kv_cache)) * 39 // 100, "cpu": "1GB"}
    auto, stream, compute = (
        plan(of, budgets, offload=offload, objective="throughput", machine=MACHINE)
        for offload in ("auto", "stream", "compute")
    )
    assert sum(seconds(auto)) <= min(sum(seconds(stream)), sum(seconds(compute)))


@pytest.mark.slow
@settings(max_examples=few(3), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 4_000_000), st.integers(0, 5_000_000), st.sampled_from(["latency", "throughput"]))
def test_budgets_hold_and_no_job_takes_longer_than_with_one_form(room: int, host: int, objective: str) -> None:
    of = profile(64)
    budgets: dict[int | str, int] = {0: room, "cpu": host}
    try:
        one = plan(of, budgets, offload="auto", objective=objective, machine=MACHINE, per_pass=False)
        found = plan(of, budgets, offload="auto", objective=objective, machine=MACHINE)
    except BudgetError:
        return
    assert memory_usage(of, assignment_of(found, of)).over(budgets) == {}
    weight = 1.0 if objective == "throughput" else 1e-3
    assert weight * seconds(found)[0] + seconds(found)[1] <= (weight * seconds(one)[0] + seconds(one)[1]) * (1 + 1e-9)
