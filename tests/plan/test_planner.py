"""."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigmodel.devices import virtual
from bigmodel.errors import BudgetError, PlanError
from bigmodel.plan import Plan, make_plan, plan
from bigmodel.plan.memory.assignment import Assignment
from bigmodel.plan.memory.evaluate import device_uses, over_budget
from bigmodel.plan.planner import without_garbage_collection
from bigmodel.plan.time.cost import CostModel
from bigmodel.profile import Profile, profile_model

from ..profile.models import Stack, on_meta, tiny_llama
from .machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")

MODEL = tiny_llama(num_hidden_layers=16, hidden_size=128, intermediate_size=256)
MACHINE = machine()


def profile(context: int = 32) -> Profile:
    return profile_model(MODEL, context_length=context, new_tokens=2, device_type="virtual")


def assignment_of(found: Plan, of: Profile) -> Assignment:
    """The plan's own words as an assignment: what a dispatcher reads from it."""
    held = tuple(found.device_map.get(unit.name, found.main_device) for unit in of.units)
    runs = tuple(found.execution.get(unit.name, found.main_device) for unit in of.units)
    return Assignment(held, runs, found.main_device, found.slots, found.slot_bytes)


def test_streamed_blocks_lie_between_resident_ones_and_the_step_is_shorter_than_greedily() -> None:
    of = profile()
    budget = {0: of.weights * 3 // 5 + of.activations + sum(of.kv_cache), "cpu": "1GB"}
    fast = machine(link=1.5e10)
    found, greedy = plan(of, budget, machine=fast), plan(of, budget, objective="fit", machine=fast)
    assert found.prediction is not None
    assert greedy.prediction is not None
    assert found.prediction.token < greedy.prediction.token
    assert found.streamed


def test_the_prediction_is_what_the_cost_model_says_of_the_plan() -> None:
    of = profile()
    found = plan(of, {0: of.weights // 2 + of.activations, "cpu": "1GB"}, machine=MACHINE)
    cost = CostModel(of, MACHINE)
    assert found.prediction is not None
    assert found.prediction.prefill == cost.seconds(0, assignment_of(found, of)).seconds
    assert found.prediction.token == cost.seconds(1, assignment_of(found, of)).seconds


def test_a_link_that_binds_is_named_and_one_more_gib_would_save_time() -> None:
    of = profile()
    found = plan(of, {0: of.weights // 2 + of.activations, "cpu": "1GB"}, machine=machine(link=1e6))
    assert found.prediction is not None
    assert "link" in found.prediction.binds
    assert found.prediction.seconds_saved_per_gib[0] > 0
    assert "would take" in found.explain()


def test_a_model_that_fits_is_resident_and_bound_by_computing() -> None:
    found = plan(MODEL, {0: "1GB", "cpu": "1GB"}, context_length=32, machine=MACHINE)
    assert set(found.device_map.values()) == {0}
    assert found.prediction is not None
    assert found.prediction.binds.startswith("computing")
    assert found.prediction.seconds_saved_per_gib[0] == 0


def test_blocks_are_computed_on_the_cpu_only_where_that_is_allowed() -> None:
    of = profile()
    budget = {0: of.weights // 2 + of.activations, "cpu": "1GB"}
    slow_link = machine(link=1e6)
    streamed, computed = (plan(of, budget, offload=offload, machine=slow_link) for offload in ("stream", "compute"))
    auto = plan(of, budget, offload="auto", machine=slow_link)
    assert all(part.runs_on == 0 for part in streamed.parts if "layers" in part.name)
    assert {part.runs_on for part in computed.parts if "layers" in part.name} == {0, "cpu"}
    assert auto.prediction is not None
    assert computed.prediction is not None
    assert streamed.prediction is not None
    assert auto.prediction.token <= computed.prediction.token < streamed.prediction.token


def test_throughput_weighs_the_prompt_too() -> None:
    of = profile(256)
    budget = {0: of.weights // 2 + of.activations + sum(of.kv_cache), "cpu": "1GB"}
    found = {
        name: plan(of, budget, objective=name, offload="auto", machine=MACHINE) for name in ("latency", "throughput")
    }

    def job(one: Plan) -> float:
        assert one.prediction is not None
        assert one.prediction.prefill is not None
        return one.prediction.prefill + one.prediction.token

    assert job(found["throughput"]) <= job(found["latency"]) + 1e-12


def test_a_plan_with_its_prediction_survives_json() -> None:
    found = plan(MODEL, {0: "2MB", "cpu": "1GB"}, context_length=16, machine=MACHINE)
    assert found.prediction is not None
    assert Plan.from_json(found.to_json()) == found
    assert "predicted:" in str(found)


def test_for_a_machine_that_is_not_here_no_time_is_predicted() -> None:
    virtual.disable()
    found = plan(MODEL, {0: "3MB", "cpu": "1GB"}, context_length=16, objective="latency")
    assert found.prediction is None
    assert any("no time is predicted" in note for note in found.notes)


def test_without_known_shapes_the_plan_is_greedy_and_says_nothing_of_time() -> None:
    model = on_meta(Stack, depth=6)
    found = plan(model, {0: 20_000, "cpu": 10**6}, machine=MACHINE)
    assert found.prediction is None
    assert found.device_map == make_plan(model, {0: 20_000, "cpu": 10**6}).device_map


@pytest.mark.parametrize("wrong", [{"objective": "speed"}, {"offload": "sometimes"}])
def test_an_unknown_choice_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong.values()))):
        plan(MODEL, {0: "1GB"}, context_length=8, machine=MACHINE, **wrong)  # type: ignore[arg-type]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 6_000_000),
    st.one_of(st.none(), st.integers(0, 6_000_000)),
    st.integers(0, 8_000_000),
    st.sampled_from(["stream", "auto"]),
    st.sampled_from([1e6, 1e9]),
)
def test_budgets_hold_and_nothing_is_slower_than_accelerates_order(
    first: int, second: int | None, host: int, offload: str, link: float
) -> None:
    of = profile(16)
    budgets: dict[int | str, int] = {0: first, "cpu": host, **({} if second is None else {1: second})}
    speeds = machine(link=link)
    try:
        found = plan(of, budgets, offload=offload, machine=speeds)
    except BudgetError:
        return
    ours = assignment_of(found, of)
    assert over_budget(device_uses(of, ours), budgets) == {}
    theirs = in_accelerates_order(of, budgets)
    if theirs is not None and found.prediction is not None:
        assert found.prediction.token <= CostModel(of, speeds).seconds(1, theirs).seconds * (1 + 1e-9)


def in_accelerates_order(of: Profile, budgets: dict[int | str, int]) -> Assignment | None:
    """The map that accelerate makes, weights only and in order, of budgets less what else is needed, as its users are
    told to choose them; None if it would not hold the budgets all the same."""
    from accelerate import infer_auto_device_map

    slots = 2 * max(unit.slab() for unit in of.units)
    beside = of.activations + sum(of.kv_cache) + of.buffers + slots
    given = {key: max(budgets[key] - beside, 0) for key in (0, 1, "cpu") if key in budgets}
    device_map = infer_auto_device_map(MODEL, given, no_split_module_classes=["LlamaDecoderLayer"])
    held = []
    for unit in of.units:
        key = next((key for key in _prefixes(unit.name) if key in device_map), None)
        held.append(device_map[key] if key is not None else 0)
    accelerators = [key for key in held if isinstance(key, int)]
    if not accelerators:
        return None
    main = min(accelerators)
    runs = [key if isinstance(key, int) else main for key in held]
    slabs = [unit.slab() for unit, key in zip(of.units, held, strict=True) if not isinstance(key, int)]
    found = Assignment(tuple(held), tuple(runs), main, min(2, len(slabs)), max(slabs, default=0))
    return None if over_budget(device_uses(of, found), budgets) else found


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("objective", ["latency"]),
        ("offload_dtype", ""),
        ("offload_dtype", torch.ones(2)),
        ("offload", None),
        ("offload_buffers", "yes"),
        ("per_pass", 3),
        ("slots", 0),
        ("slots", 1.5),
        ("machine", "this one"),
        ("batch_size", float("nan")),
        ("model", 3),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(argument: str, value: Any) -> None:
    given: dict[str, Any] = {"model": tiny_llama(), "max_memory": {"cpu": "1GB"}, "context_length": 16, argument: value}
    with pytest.raises(PlanError, match=argument):
        plan(**given)


def test_the_collector_rests_meanwhile_and_goes_on_also_after_an_error() -> None:
    with pytest.raises(ValueError), without_garbage_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
