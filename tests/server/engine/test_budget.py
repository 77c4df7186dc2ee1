"""Limits of the engine come from the plan, and from the options where those fit it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from bigmodel.errors import ServeError
from bigmodel.limits import KV_SPARE_PAGES
from bigmodel.plan import Plan
from bigmodel.plan.result.plan import DevicePlan
from bigmodel.server.engine.budget import (
    ANY_NUMBER,
    DEFAULT_SEQUENCES,
    EngineOptions,
    KVBudget,
    claimed_bytes,
    kv_budget,
    plan_devices,
    positions_of_attention,
    sequences_at_once,
    tokens_of_a_step,
)
from bigmodel.server.engine.kv.buffers import GROWTH, PROMPT_BLOCK

SEQUENCES, CONTEXT, PER_TOKEN = 4, 256, 100
KV = SEQUENCES * CONTEXT * PER_TOKEN


class Holder:
    """Keys and values of :data:`PER_TOKEN` bytes on the host."""

    def bytes_per_token(self) -> dict[str, int]:
        return {"cpu": PER_TOKEN}


def planned(*, room_for: int | None = SEQUENCES, batch_size: int = SEQUENCES) -> Plan:
    """A plan for four sequences of 256 tokens, under a budget with room for ``room_for`` of them (None: no budget)."""
    each = CONTEXT * PER_TOKEN
    weights, activations = 5000, 700
    budget = None if room_for is None else weights + activations + room_for * each + each // 2
    entry = DevicePlan("cpu", budget, weights=weights, kv_cache=batch_size * each, activations=activations)
    return Plan(
        "Tiny", "auto", "cpu", MappingProxyType({"cpu": entry}), (), batch_size=batch_size, context_length=CONTEXT
    )


def kv_bytes(plan: Plan | None, **options: Any) -> int:
    return kv_budget([Holder()], plan, EngineOptions(**options)).bytes_total["cpu"]


@pytest.mark.parametrize(
    ("room_for", "expected"),
    [(SEQUENCES, SEQUENCES), (9, 9), (1000, DEFAULT_SEQUENCES), (None, SEQUENCES)],
)
def test_sequences_at_once_are_those_that_fit_the_plan(room_for: int | None, expected: int) -> None:
    plan = planned(room_for=room_for)
    assert sequences_at_once(plan, EngineOptions()) == expected
    assert kv_bytes(plan) == expected * CONTEXT * PER_TOKEN  # every one of them to its full length


def test_a_plan_for_more_than_the_default_is_used() -> None:
    assert sequences_at_once(planned(room_for=40, batch_size=40), EngineOptions()) == 40


def test_without_a_plan_there_is_a_default() -> None:
    assert sequences_at_once(None, EngineOptions()) == DEFAULT_SEQUENCES


def test_given_sequences_are_limited_by_memory() -> None:
    """Many short sequences fit the memory of few long ones, because positions are counted."""
    plan = planned(room_for=9)
    assert sequences_at_once(plan, EngineOptions(max_sequences=64)) == 64
    assert kv_bytes(plan, max_sequences=64) == 9 * CONTEXT * PER_TOKEN
    assert kv_bytes(plan, max_sequences=1) == KV  # what was planned is there anyway


def test_more_kv_bytes_than_the_plan_leaves_are_refused() -> None:
    plan = planned(room_for=9)
    entry = plan.devices["cpu"]
    assert entry.free is not None
    most = entry.kv_cache + entry.free
    assert kv_bytes(plan, kv_bytes=most) == most
    with pytest.raises(ServeError, match="more than the plan leaves on cpu"):
        kv_bytes(plan, kv_bytes=most + 1)


@pytest.mark.parametrize("gather", [0, 1, 3])
def test_more_sequences_leave_what_the_plan_says_attention_gathers(gather: int) -> None:
    plan = planned(room_for=12)
    entry = replace(plan.devices["cpu"], kv_gather=KV // 4 * gather)
    plan = replace(plan, devices={"cpu": entry})
    assert entry.free is not None
    budget = kv_budget([Holder()], plan, EngineOptions(max_sequences=64), {"cpu": 1}).bytes_total["cpu"]
    further = budget / KV - 1
    assert further * (KV + entry.kv_gather) <= entry.free
    assert plan.max_sequences() == SEQUENCES + {0: 8, 1: 6, 3: 4}[gather] == budget // (CONTEXT * PER_TOKEN)


def test_a_plan_without_keys_and_values_says_nothing_of_what_is_gathered() -> None:
    entry = DevicePlan("cpu", 4000, weights=1000)
    plan = replace(planned(), devices={"cpu": entry})
    asked = EngineOptions(kv_bytes=2000)
    assert kv_budget([Holder()], plan, asked, {"cpu": PER_TOKEN // 2}).bytes_total["cpu"] == 2000
    with pytest.raises(ServeError, match="more than the plan leaves on cpu"):
        kv_budget([Holder()], plan, asked, {"cpu": PER_TOKEN})


def test_a_step_computes_no_more_tokens_than_activations_were_planned_for() -> None:
    plan = planned()
    assert tokens_of_a_step(plan, EngineOptions()) == 512
    assert tokens_of_a_step(plan, EngineOptions(max_batch_tokens=4096)) == SEQUENCES * CONTEXT
    assert tokens_of_a_step(None, EngineOptions(max_batch_tokens=4096)) == 4096


def test_attention_has_memory_for_the_positions_that_its_planned_rows_attend_to() -> None:
    assert positions_of_attention(planned()) == CONTEXT * SEQUENCES * CONTEXT // PROMPT_BLOCK
    assert positions_of_attention(replace(planned(), prefill_chunk_size=64)) == CONTEXT * SEQUENCES * 64 // PROMPT_BLOCK
    assert positions_of_attention(replace(planned(), prefill_chunk_size=16)) == CONTEXT
    assert positions_of_attention(None) == ANY_NUMBER


def test_many_sequences_raise_the_tokens_of_a_step() -> None:
    assert tokens_of_a_step(None, EngineOptions(max_sequences=600)) == 600 + 128
    assert tokens_of_a_step(replace(planned(), context_length=8), EngineOptions()) == SEQUENCES + 128


def test_a_model_claims_what_its_plan_has() -> None:
    plan = planned(room_for=9)
    entry = plan.devices["cpu"]
    assert claimed_bytes(plan, EngineOptions(max_sequences=SEQUENCES)) == {"cpu": entry.total}
    assert claimed_bytes(plan, EngineOptions()) == {"cpu": entry.total + (9 - SEQUENCES) * CONTEXT * PER_TOKEN}


def test_more_keys_and_values_are_claimed_with_what_attention_gathers_of_them() -> None:
    plan = planned(room_for=12)
    entry = replace(plan.devices["cpu"], kv_gather=KV // 4)
    plan = replace(plan, devices={"cpu": entry})
    assert claimed_bytes(plan, EngineOptions(kv_bytes=KV)) == {"cpu": entry.total}
    assert claimed_bytes(plan, EngineOptions(kv_bytes=2 * KV)) == {"cpu": entry.total + KV + KV // 4}
    with pytest.raises(ServeError, match="more than the plan leaves on cpu"):
        claimed_bytes(plan, EngineOptions(kv_bytes=20 * KV))


def test_a_plan_that_is_made_anew_once_it_is_measured_claims_its_budgets() -> None:
    plan = replace(planned(room_for=9), guarded=True)
    assert claimed_bytes(plan, EngineOptions()) == {"cpu": plan.devices["cpu"].budget}


def test_devices_have_canonical_names() -> None:
    entry = DevicePlan("cpu", None)
    assert plan_devices(replace(planned(), devices={"cpu": entry})) == {"cpu": entry}
    assert plan_devices(None) == {}


def test_options_that_depend_on_plan_and_machine_are_none_by_default() -> None:
    options = EngineOptions()
    assert (options.max_sequences, options.kv_bytes, options.max_length) == (None, None, None)
    assert (options.row_multiple, options.host_linear) == ("auto", "auto")


def test_engine_options_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineOptions().max_queue = 1  # type: ignore[misc]


def test_the_tightest_device_decides() -> None:
    budget = KVBudget({"cuda:0": 100, "cuda:1": 10}, {"cuda:0": 100 * GROWTH * 3, "cuda:1": 10 * GROWTH * 5})
    assert budget.tokens == 3 * GROWTH


def test_a_budget_too_small_for_one_sequence_is_refused_with_numbers() -> None:
    with pytest.raises(ServeError, match=f"1000.*do not hold {GROWTH} tokens"):
        _ = KVBudget({"cpu": 100}, {"cpu": 1000}).tokens


def test_positions_on_disk_count_beside_those_in_ram() -> None:
    page = PROMPT_BLOCK * PER_TOKEN
    budget = KVBudget({"cpu": PER_TOKEN}, {"cpu": 12 * page + 5}, (20 + KV_SPARE_PAGES) * page)
    assert (budget.tokens, budget.in_ram) == (32 * PROMPT_BLOCK, 12 * PROMPT_BLOCK)
    alone = KVBudget({"cpu": PER_TOKEN}, {"cpu": 12 * page})
    assert (alone.tokens, alone.in_ram) == (12 * PROMPT_BLOCK, None)


def test_a_step_writes_to_no_more_pages_than_ram_has() -> None:
    options = EngineOptions(max_sequences=2, max_batch_tokens=512)
    pages = 2 * 2 + KV_SPARE_PAGES  # two of each sequence, and those that are written ahead
    assert tokens_of_a_step(None, options, (pages + 100) * PROMPT_BLOCK) == 512
    assert tokens_of_a_step(None, options, (pages + 3) * PROMPT_BLOCK) == 3 * PROMPT_BLOCK
    with pytest.raises(ServeError, match="let fewer sequences run"):
        tokens_of_a_step(None, options, (pages + 1) * PROMPT_BLOCK)
