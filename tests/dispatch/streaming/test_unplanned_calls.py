"""Calls of a language model beyond its plan keep to the budgets, or end in one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from bigmodel import dispatch_model, get_plan, make_plan
from bigmodel.devices import max_memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch.streaming.unplanned_calls import UnplannedCalls, of_plan
from bigmodel.errors import BudgetError
from bigmodel.limits import PLANNED_SHARE
from bigmodel.plan import Plan

from ...accelerators import at, exact
from ..models import llama

TOKENS = torch.arange(64).view(1, 64) % 20


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(llama(layers=2), {0: "1GB", "cpu": "1GB"}, context_length=64)


def size_of(plan: Plan, *args: Any, **kwargs: Any) -> Any:
    calls = of_plan(plan, LlamaForCausalLM.forward.__get__(llama(layers=2)))
    assert isinstance(calls, UnplannedCalls)
    with torch.no_grad():
        return calls.size_of(args, kwargs)


@pytest.mark.slow
def test_what_generate_runs_is_planned(plan: Plan) -> None:
    assert size_of(plan, input_ids=TOKENS, logits_to_keep=1) is None
    assert size_of(plan, TOKENS[:, :1]) is None
    assert size_of(plan, other=TOKENS) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"input_ids": TOKENS},
        {"input_ids": TOKENS, "logits_to_keep": 0},
        {"inputs_embeds": torch.zeros(1, 64, 8)},
        {"input_ids": TOKENS.repeat(2, 1), "logits_to_keep": 1},
        {"input_ids": TOKENS[:, :1], "labels": TOKENS[:, :1]},
    ],
)
def test_calls_of_more_tokens_or_scores_or_with_a_loss_are_not(plan: Plan, arguments: dict[str, Any]) -> None:
    assert size_of(plan, **arguments) is not None


def test_calls_that_record_gradients_are_planned_as_training(plan: Plan) -> None:
    calls = of_plan(plan, LlamaForCausalLM.forward.__get__(llama(layers=2)))
    assert calls is not None
    assert calls.size_of((TOKENS,), {"labels": TOKENS}) is None


@torch.no_grad()
def test_calls_like_one_that_fitted_are_measured_no_more(plan: Plan) -> None:
    calls = of_plan(plan, LlamaForCausalLM.forward.__get__(llama(layers=2)))
    assert calls is not None
    found = calls.size_of((TOKENS,), {})
    assert found is not None
    calls.fits(found)
    assert calls.size_of((TOKENS[:, :8],), {}) is None
    assert calls.size_of((TOKENS,), {"labels": TOKENS}) is not None
    assert calls.size_of((TOKENS.repeat(2, 1),), {}) is not None


def test_models_without_text_have_no_unplanned_calls() -> None:
    plan = make_plan(nn.Linear(2, 2), {"cpu": "1GB"}, sample_inputs=torch.ones(1, 2))
    assert of_plan(plan, nn.Linear.forward) is None


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@exact
def test_a_loss_is_computed_within_the_budget_or_refused_in_one_line() -> None:
    resident, model = llama(layers=2).eval().to(at(0)), llama(layers=2).eval()
    whole = make_plan(model, {0: "1GB", "cpu": "1GB"}, context_length=64).devices[0]
    budget = whole.total - whole.weights // 2
    plan = make_plan(model, {0: budget, "cpu": "1GB"}, context_length=64)
    assert plan.main_device == 0
    dispatch_model(model, plan)
    few, many = TOKENS[:, :8], TOKENS.repeat(64, 1)
    with torch.no_grad():
        expected = resident(few.to(at(0)), labels=few.to(at(0))).loss
        del resident
        reset_peak_memory(0)
        assert torch.equal(model(few, labels=few).loss.cpu(), expected.cpu())
        with pytest.raises(BudgetError, match=r"passes the budget of device 0 by .* smaller inputs"):
            model(many, labels=many)
    assert max_memory_allocated(0) <= budget


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@exact
def test_beside_budgets_that_nobody_gave_the_rest_of_the_device_is_used() -> None:
    model = llama(layers=2).eval()
    whole = make_plan(model, {0: "1GB", "cpu": "1GB"}).devices[0]
    virtual.enable(count=1, capacity=int((whole.total - whole.weights // 2) / PLANNED_SHARE))
    dispatch_model(model, "auto")
    budget = get_plan(model).devices[0].budget
    ids = torch.ones(1, 134, dtype=torch.long)
    with torch.no_grad():
        model(ids, labels=ids)
    assert budget is not None
    assert budget < max_memory_allocated(0)
