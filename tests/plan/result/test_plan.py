"""The plan as a value: its totals, its forms, and JSON that survives a round trip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Group

from bigmodel.errors import PlanError
from bigmodel.plan import DevicePlan, Part, Plan, Prediction, make_plan
from bigmodel.plan.result.plan import max_sequences
from bigmodel.profile import profile_model

from ...profile.models import Flat, tiny_llama

PLAN = Plan(
    model="Tiny",
    strategy="auto",
    main_device=0,
    devices={
        0: DevicePlan(0, 100, weights=10, buffers=1, kv_cache=20, activations=30, slots=8),
        "cpu": DevicePlan("cpu", 50, weights=12),
        "disk": DevicePlan("disk", None, weights=4),
    },
    parts=(
        Part("embed", "cpu", "cpu", 4, "looked up in RAM", "Embedding"),
        Part("layers.0", 0, 0, 4, "resident: it fits", "Layer"),
        Part("layers.1", 0, 0, 4, "resident: it fits", "Layer"),
        Part("layers.2", "cpu", 0, 4, "streamed from RAM", "Layer"),
        Part("layers.3", "disk", 0, 4, "streamed from disk", "Layer"),
    ),
    slots=2,
    slot_bytes=4,
    context_length=16,
)


def test_a_devices_total_is_the_sum_of_its_purposes() -> None:
    assert PLAN.devices[0].total == 69
    assert PLAN.devices[0].free == 31
    assert PLAN.devices["disk"].free is None


def test_the_device_map_and_where_parts_run() -> None:
    assert PLAN.device_map == {
        "embed": "cpu", "layers.0": 0, "layers.1": 0, "layers.2": "cpu", "layers.3": "disk",
    }  # fmt: skip
    assert PLAN.execution == {"embed": "cpu", "layers.0": 0, "layers.1": 0, "layers.2": 0, "layers.3": 0}


def test_streamed_parts_run_on_another_device_than_their_storage() -> None:
    assert [part.name for part in PLAN.streamed] == ["layers.2", "layers.3"]


def test_parts_that_the_host_computes_in_calls_of_few_tokens_are_named_with_the_number() -> None:
    switching = Part("layers.0", "cpu", 0, 4, "streamed from RAM for a prompt", computed_below=17)
    assert replace(PLAN, parts=(switching, *PLAN.parts[2:])).computed_below == {"layers.0": 17}
    assert PLAN.computed_below == {}


def test_a_plan_has_text_table_json_html_and_a_picture(tmp_path: Path) -> None:
    assert "resident: it fits" in str(PLAN)
    assert isinstance(PLAN.to_table(), Group)
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert "Device cpu holds 12 B weights" in PLAN.explain()
    assert PLAN.to_html().startswith("<!doctype html>")
    assert PLAN.plot(tmp_path / "plan.svg").read_text().startswith("<svg")
    assert PLAN.max_sequences() == 2


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("more", [0, 1, 5])
def test_free_memory_holds_further_sequences(more: int) -> None:
    profile = profile_model(tiny_llama(), batch_size=2, context_length=64, device_type="virtual")
    whole = make_plan(profile, {0: "100MB"}).devices[0]
    assert whole.kv_gather == max(profile.kv_cache) > 0
    exact, each = whole.total, (sum(profile.kv_cache) + max(profile.kv_cache)) // 2
    assert max_sequences(make_plan(profile, {0: exact + more * each})) == 2 + more
    assert max_sequences(make_plan(profile, {0: exact + more * each + each - 1})) == 2 + more


@pytest.mark.slow
def test_a_host_gathers_no_pages() -> None:
    profile = profile_model(tiny_llama(), batch_size=2, context_length=64)
    assert make_plan(profile, {"cpu": "100MB"}).devices["cpu"].kv_gather == 0


def test_max_sequences_is_none_without_a_kv_cache() -> None:
    assert max_sequences(make_plan(Flat(), {"cpu": 10**6})) is None


def test_json_gives_the_plan_back() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    timed = replace(PLAN, prediction=Prediction(1.5, 0.25, "link to 0", {0: 0.1, "cpu": 0.0}))
    assert Plan.from_json(timed.to_json(indent=None)) == timed


def test_device_numbers_stay_numbers() -> None:
    assert list(Plan.from_json(PLAN.to_json()).devices) == [0, "cpu", "disk"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", '{"format": 99}',
        json.dumps({**json.loads(PLAN.to_json()), "parts": [{"name": 3}]}),
        json.dumps({**json.loads(PLAN.to_json()), "devices": None}),
        json.dumps({**json.loads(PLAN.to_json()), "expert_cache": "disk"}),
        "[" * 100_000, "1" * 5000,
    ],
)  # fmt: skip
def test_text_that_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)


def test_tokens_per_second_count_the_prompt_and_all_steps_after_it() -> None:
    found = replace(PLAN, batch_size=4, new_tokens=3, prediction=Prediction(2.0, 0.5, "the link"))
    assert found.tokens_per_second == 4 * 3 / (2.0 + 2 * 0.5)
    assert replace(found, prediction=Prediction(None, 0.5, "the link")).tokens_per_second == 4 / 0.5
    assert replace(found, prediction=None).tokens_per_second is None
