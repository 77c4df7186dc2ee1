"""`with_split_blocks`: blocks are split into smaller parts where slots for whole ones take much of an accelerator."""

from __future__ import annotations

import copy
import gc
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from bigmodel import Plan, dispatch_model, make_plan
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.errors import BudgetError
from bigmodel.plan.search.split_blocks import GAIN, SPLIT_BLOCKS
from bigmodel.profile import profile_model

from ...accelerators import at
from ...dispatch.models import llama
from ..machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")

SLOW_HOST = machine(host=1e-6)
"""A machine on which even the slowest link is faster than the host."""

JOB = {"batch_size": 2, "context_length": 12, "new_tokens": 4}
RAM = {"cpu": 2**34}


@cache
def model(layers: int = 3) -> LlamaForCausalLM:
    """A Llama of few, wide layers: each is a large share of the weights."""
    return llama(layers, hidden_size=64, intermediate_size=256)


def weights(of: Any) -> int:
    return sum(parameter.nbytes for parameter in of.parameters())


def planned(budget: float, **options: Any) -> Plan:
    """Return the plan of the model with a budget of that share of its weights."""
    return make_plan(model(), {0: int(budget * weights(model())), **RAM}, padded=False, **JOB, **options)


def test_split_blocks_are_planned_where_they_are_predicted_to_be_faster() -> None:
    made = planned(0.75, machine=SLOW_HOST, objective="latency")
    whole = planned(0.75, machine=SLOW_HOST, objective="latency", no_split_module_classes=["LlamaDecoderLayer"])
    assert SPLIT_BLOCKS in made.notes
    assert SPLIT_BLOCKS not in whole.notes
    assert made.slot_bytes < whole.slot_bytes
    assert made.prediction is not None
    assert whole.prediction is not None
    assert made.prediction.token <= (1 - GAIN) * whole.prediction.token


def test_without_predictions_blocks_that_an_accelerator_can_run_stay_whole() -> None:
    made = planned(0.75)
    assert "LlamaDecoderLayer" in {part.kind for part in made.streamed}
    assert SPLIT_BLOCKS not in made.notes


def test_blocks_that_do_not_fit_are_split_so_that_the_accelerator_runs_the_model() -> None:
    made = planned(0.4)
    assert SPLIT_BLOCKS in made.notes
    assert {part.runs_on for part in made.parts} == {0}
    whole = planned(0.4, no_split_module_classes=["LlamaDecoderLayer"])
    assert {part.runs_on for part in whole.parts} == {"cpu"}


def test_an_attention_stays_whole_and_its_keys_and_values_are_known() -> None:
    made = planned(0.4)
    assert sum(part.kind == "LlamaAttention" for part in made.parts) == 3
    assert {"up_proj", "down_proj"} <= {part.name.rpartition(".")[2] for part in made.parts}
    fits = make_plan(model(), {0: 2**34}, padded=False, **JOB)
    assert made.devices[0].kv_cache == fits.devices[0].kv_cache > 0


@pytest.mark.parametrize("budget", [0.3, 0.4, 0.75])
def test_the_tokens_are_those_of_the_resident_model_and_the_peak_is_the_planned_one(budget: float) -> None:
    made = Plan.from_json(planned(budget, machine=SLOW_HOST, objective="throughput").to_json())
    assert SPLIT_BLOCKS in made.notes
    prompt = torch.arange(16).reshape(2, 8)
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = copy.deepcopy(model()).to(at(0)).generate(prompt.to(at(0)), **options).cpu()
    dispatched = dispatch_model(copy.deepcopy(model()), made)
    gc.collect()
    assert memory_allocated(0) < made.devices[0].total
    reset_peak_memory(0)
    with torch.inference_mode():
        found = dispatched.generate(prompt, **options)
    assert torch.equal(found, expected)
    planned_peak, budget_bytes = made.devices[0].total, made.devices[0].budget
    assert budget_bytes is not None
    assert 0.99 * planned_peak <= max_memory_allocated(0) <= planned_peak <= budget_bytes


@pytest.mark.parametrize(
    "options", [{"strategy": "sequential"}, {"objective": "fit", "machine": SLOW_HOST}, {"per_pass": False}]
)
def test_other_ways_of_planning_keep_blocks_whole(options: dict[str, Any]) -> None:
    assert SPLIT_BLOCKS not in planned(0.4, **options).notes


def test_a_profile_has_the_blocks_that_it_was_made_with() -> None:
    budget = {0: int(0.4 * weights(model())), **RAM}
    assert SPLIT_BLOCKS not in make_plan(profile_model(model(), padded=False, **JOB), budget).notes
    kind = torch.device(at(0)).type
    split = make_plan(profile_model(model(), padded=False, split_blocks=True, device_type=kind, **JOB), budget)
    assert {part.runs_on for part in split.parts} == {0}


def test_a_budget_that_is_too_small_for_split_blocks_is_refused_as_for_whole_ones() -> None:
    little = {0: 4096, "cpu": weights(model()) // 2, "disk": 0}
    with pytest.raises(BudgetError) as raised:
        make_plan(model(), little, padded=False, **JOB)
    with pytest.raises(BudgetError) as whole:
        make_plan(model(), little, padded=False, no_split_module_classes=["LlamaDecoderLayer"], **JOB)
    assert str(raised.value) == str(whole.value)


def test_experts_of_a_mixture_are_fetched_one_by_one_in_whole_blocks() -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    mixture = MixtralForCausalLM(config).eval()
    budget = {0: int(0.8 * weights(mixture)), **RAM}
    made = make_plan(mixture, budget, machine=SLOW_HOST, objective="latency", padded=False, **JOB)
    assert made.expert_cache
    assert SPLIT_BLOCKS not in made.notes
