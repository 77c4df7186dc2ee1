"""A plan of training, against the counters of the virtual accelerator in a real step."""

from __future__ import annotations

import gc
import re
from functools import cache
from typing import Any

import pytest
import torch
import transformers as t

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model
from bigmodel.errors import BudgetError, PlanError
from bigmodel.plan import Plan, plan_training

from ..examples import alike

pytestmark = pytest.mark.usefixtures("accelerators")

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return t.LlamaForCausalLM(t.LlamaConfig(**{**SIZES, **sizes}))


@cache
def planned(budget: int) -> Plan:
    """The plan of `llama()` for steps of 2 x 32 tokens."""
    return plan_training(llama(), {0: budget, "cpu": 2**30}, 2, 32)


def trained(model: Any, plan: Plan) -> int:
    """Dispatch by plan, train, and return the accelerator's peak in the second step."""
    gc.collect()
    before = memory_allocated(0)
    dispatch_model(model.train(), plan)
    ids = torch.zeros(2, 32, dtype=torch.long).to("virtual:0")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for step in range(2):
        if step:
            reset_peak_memory(0)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return max_memory_allocated(0) - before


def bytes_kept(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """The bytes of gradients and of the optimizer's state on the host."""
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    kept += [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in kept if tensor.device.type == "cpu")


@pytest.mark.slow
@alike(("budget", "blocks"), [(1_050_000, 2), (10_000_000, 0), (1_900_000, 1)], first=1)
def test_the_accelerators_peak_is_the_planned_one_for_any_number_of_streamed_blocks(budget: int, blocks: int) -> None:
    plan = planned(budget)
    assert sum("layers" in part.name for part in plan.streamed) == blocks
    assert plan.devices[0].total <= budget
    assert trained(llama(), plan) == plan.devices[0].total


@pytest.mark.slow
def test_a_frozen_base_has_little_training_memory_and_more_of_it_fits() -> None:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.requires_grad_(True)
    budget = 1_050_000
    plan = plan_training(model, {0: budget, "cpu": 2**30}, 2, 32)
    assert 0 < len(plan.streamed) < len(planned(budget).streamed)
    assert trained(model, plan) == plan.devices[0].total <= budget


@pytest.mark.long
@pytest.mark.slow
def test_adapters_of_peft_are_planned_with_the_blocks_they_are_in() -> None:
    peft = pytest.importorskip("peft")
    model: Any = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    plan = plan_training(model, {0: 1_000_000, "cpu": 2**30}, 2, 32)
    assert plan.streamed
    assert trained(model, plan) == plan.devices[0].total


@pytest.mark.long
@pytest.mark.slow
def test_tied_embeddings_stay_together() -> None:
    model = llama(tie_word_embeddings=True)
    plan = plan_training(model, {0: 1_300_000, "cpu": 2**30}, 2, 32)
    assert plan.device_map["lm_head"] == plan.device_map["model.embed_tokens"]
    assert trained(model, plan) == plan.devices[0].total


@pytest.mark.slow
def test_gradients_and_optimizer_state_of_streamed_parts_are_on_the_host() -> None:
    model, plan = llama(), planned(1_050_000)
    dispatch_model(model.train(), plan)
    ids = torch.zeros(2, 32, dtype=torch.long).to("virtual:0")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert plan.devices["cpu"].training == bytes_kept(model, optimizer)
    assert plan.devices["cpu"].weights == sum(p.nbytes for p in model.parameters() if p.device.type == "cpu")
    assert "training" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_without_accelerators_everything_is_on_the_host() -> None:
    plan = plan_training(llama(), {"cpu": 2**30}, 2, 32)
    assert plan.main_device == "cpu"
    assert set(plan.device_map.values()) == {"cpu"}
    assert plan.devices["cpu"].training > 3 * plan.devices["cpu"].weights


@pytest.mark.long
@pytest.mark.slow
def test_the_error_names_the_smallest_sufficient_budget() -> None:
    model, budgets = llama(num_hidden_layers=1), {0: 100_000, "cpu": 2**20}

    def planned_with(budget: int) -> Plan:
        return plan_training(model, {**budgets, 0: budget}, 1, 8, "sgd")

    with pytest.raises(BudgetError) as refused:
        planned_with(budgets[0])
    named = re.search(r"0: [^(]*\((\d+) bytes", str(refused.value))
    assert named is not None
    assert planned_with(int(named[1])).devices[0].total == int(named[1])
    with pytest.raises(BudgetError):
        planned_with(int(named[1]) - 1)


@pytest.mark.slow
def test_the_error_says_that_a_disk_budget_does_not_help() -> None:
    with pytest.raises(BudgetError, match="weights that are trained are not held there"):
        plan_training(llama(num_hidden_layers=1), {0: 100_000, "cpu": 50_000, "disk": "1GB"}, 1, 8, "sgd")


@pytest.mark.slow
def test_the_plan_of_a_mixture_notes_that_all_experts_are_counted() -> None:
    sizes = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_hidden_layers": 1}
    model = t.MixtralForCausalLM(t.MixtralConfig(**sizes))
    assert "experts are counted as if all" in str(plan_training(model, {0: "100MB", "cpu": "1GB"}, 1, 16))


def test_an_unknown_optimizer_is_an_error() -> None:
    with pytest.raises(PlanError, match="optimizer is 'lion'; use one of adamw"):
        plan_training(llama(), {"cpu": 2**30}, optimizer="lion")


@pytest.mark.slow
def test_several_accelerators_are_refused_unless_one_is_named() -> None:
    with pytest.raises(PlanError, match="one accelerator and the host"):
        plan_training(llama(), {0: "1GB", 1: "1GB", "cpu": "1GB"}, context_length=8)
    found = plan_training(
        llama(num_hidden_layers=1), {0: "1GB", 1: "1GB", "cpu": "1GB"}, 1, 8, optimizer="sgd", main_device=1
    )
    assert found.main_device == 1
