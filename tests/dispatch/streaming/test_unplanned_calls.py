"""Calls of a language model beyond its plan keep to the budgets, or end in one clear error."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from bigmodel import dispatch_model, get_plan, make_plan
from bigmodel.devices import max_memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch.streaming.unplanned_calls import MeasuredCalls, UnplannedCalls, of_part, of_plan
from bigmodel.errors import BudgetError
from bigmodel.limits import PLANNED_SHARE
from bigmodel.plan import Plan
from tests.examples import alike

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
        {"input_ids": TOKENS[:, :1], "output_hidden_states": True},
        {"input_ids": TOKENS[:, :1], "output_attentions": True},
    ],
)
def test_calls_of_more_tokens_or_scores_or_with_a_loss_are_not(plan: Plan, arguments: dict[str, Any]) -> None:
    assert size_of(plan, **arguments) is not None


def cached(tokens: int, rows: int = 1) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(rows, 2, tokens, 8), torch.zeros(rows, 2, tokens, 8), 0)
    return cache


@pytest.mark.slow
def test_a_step_is_beyond_the_plan_once_keys_and_values_are(plan: Plan) -> None:
    assert size_of(plan, TOKENS[:, :1], past_key_values=cached(63)) is None
    assert size_of(plan, TOKENS[:, :1], past_key_values=cached(64)) is not None
    assert size_of(plan, TOKENS[:, :1].repeat(4, 1), past_key_values=cached(15, 4)) is None
    assert size_of(plan, TOKENS[:, :1].repeat(4, 1), past_key_values=cached(16, 4)) is not None


@pytest.mark.slow
def test_a_static_cache_has_memory_for_all_that_it_may_hold(plan: Plan) -> None:
    config = llama(layers=2).config
    assert size_of(plan, TOKENS[:, :1], past_key_values=StaticCache(config, max_cache_len=64)) is None
    assert size_of(plan, TOKENS[:, :1], past_key_values=StaticCache(config, max_cache_len=65)) is not None


@torch.no_grad()
def test_steps_are_measured_again_once_they_may_take_what_the_last_measured_one_left(plan: Plan) -> None:
    calls = of_plan(plan, LlamaForCausalLM.forward.__get__(llama(layers=2)))
    assert calls is not None
    found = calls.size_of((TOKENS[:, :1],), {"past_key_values": cached(79)})
    assert found is not None
    calls.fits(found, 1.25)
    assert calls.size_of((TOKENS[:, :1],), {"past_key_values": cached(99)}) is None
    assert calls.size_of((TOKENS[:, :1],), {"past_key_values": cached(100)}) is not None
    assert calls.size_of((TOKENS[:, :2],), {"past_key_values": cached(79)}) is not None


@torch.no_grad()
def test_a_part_is_measured_with_more_tokens_than_planned(plan: Plan) -> None:
    calls = of_part(plan, nn.Module.forward)
    assert calls is not None
    assert calls.size_of((torch.zeros(1, 64, 32),), {}) is None
    assert calls.size_of((), {"hidden_states": torch.zeros(1, 65, 32)}) is not None
    assert calls.size_of((torch.zeros(65),), {}) is None


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


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@torch.no_grad()
def test_labels_among_sample_inputs_plan_the_loss_beside_generation() -> None:
    text, many = {"input_ids": TOKENS, "labels": TOKENS}, TOKENS.repeat(2, 1)
    made = make_plan(llama(layers=2), {0: "1GB", "cpu": "1GB"}, sample_inputs=text, context_length=64)
    plan = make_plan(
        llama(layers=2),
        {0: made.devices[0].total - made.devices[0].weights // 2, "cpu": "1GB"},
        sample_inputs=text,
        context_length=64,
    )
    assert plan.streamed
    assert plan.devices[0].kv_cache > 0
    assert size_of(plan, **text) is None
    assert size_of(plan, TOKENS, logits_to_keep=1) is None
    assert size_of(plan, input_ids=many, labels=many) is not None
    model = dispatch_model(llama(layers=2), plan)
    reset_peak_memory(0)
    assert torch.equal(model(**text).loss.cpu(), llama(layers=2)(**text).loss)
    assert max_memory_allocated(0) <= plan.devices[0].total


class Pictures(nn.Module):
    """Convolutions that keep what the way down has, as a U-Net does."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(depth))

    def forward(self, image: torch.Tensor, mask: torch.Tensor | None = None, all_layers: bool = False) -> Any:
        found = [image]
        for layer in self.layers:
            found.append(torch.relu(layer(found[-1])) if mask is None else layer(found[-1]) * mask)
        return found if all_layers else sum(found)


IMAGE = torch.ones(2, 8, 6, 6)


@pytest.fixture(scope="module")
def calls_of_pictures() -> MeasuredCalls[Any]:
    plan = make_plan(Pictures(), {0: "1GB", "cpu": "1GB"}, sample_inputs=(IMAGE,))
    calls = of_plan(Plan.from_json(plan.to_json()), Pictures.forward.__get__(Pictures()))
    assert calls is not None
    return calls


@torch.no_grad()
@pytest.mark.parametrize(
    ("args", "kwargs", "is_planned"),
    [
        ((IMAGE,), {}, True),
        ((IMAGE[:1, :, :3],), {"mask": None, "all_layers": False}, True),
        ((), {"image": IMAGE}, True),
        ((IMAGE.repeat(2, 1, 1, 1),), {}, False),
        ((IMAGE[:1].repeat(1, 1, 2, 1),), {}, False),
        ((IMAGE.double(),), {}, False),
        ((IMAGE, IMAGE[:1, :1]), {}, False),
        ((IMAGE,), {"all_layers": True}, False),
    ],
)
def test_without_text_inputs_larger_than_planned_or_further_ones_are_not(
    calls_of_pictures: MeasuredCalls[Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_planned: bool
) -> None:
    assert (calls_of_pictures.size_of(args, kwargs) is None) == is_planned


@torch.no_grad()
def test_inputs_that_fitted_are_measured_no_more(calls_of_pictures: MeasuredCalls[Any]) -> None:
    found = calls_of_pictures.size_of((IMAGE.repeat(4, 1, 1, 1),), {})
    assert found is not None
    calls_of_pictures.fits(found)
    assert calls_of_pictures.size_of((IMAGE.repeat(3, 1, 1, 1),), {}) is None
    assert calls_of_pictures.size_of((IMAGE.repeat(5, 1, 1, 1),), {}) is not None
    assert calls_of_pictures.size_of((IMAGE.repeat(3, 1, 1, 1),), {"all_layers": True}) is not None


def test_models_whose_inputs_are_not_known_have_no_unplanned_calls() -> None:
    plan = make_plan(nn.Linear(2, 2), {"cpu": "1GB"})
    assert of_plan(plan, nn.Linear.forward) is None
    assert of_part(plan, nn.Linear.forward) is None


@pytest.mark.usefixtures("every_accelerator")
@exact
@torch.no_grad()
@pytest.mark.parametrize("part", ["", "layers.1"])
def test_larger_inputs_without_text_keep_to_the_budget_or_end_in_one_error(part: str) -> None:
    whole = make_plan(Pictures(), {0: "1GB", "cpu": "1GB"}, sample_inputs=(IMAGE,)).devices[0]
    budget = whole.total - whole.weights // 4
    plan = make_plan(Pictures(), {0: budget, "cpu": "1GB"}, sample_inputs=(IMAGE,))
    assert plan.streamed
    model = dispatch_model(Pictures(), plan)
    reset_peak_memory(0)
    called = model.get_submodule(part)
    called(IMAGE)
    with pytest.raises(BudgetError, match=r"larger or further inputs than planned passes the budget of device 0 by"):
        called(IMAGE.repeat(32, 1, 1, 1))
    assert max_memory_allocated(0) <= budget


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


def _returned(model: LlamaForCausalLM) -> object:
    return model.generate(
        TOKENS[:, :4], max_new_tokens=24, min_new_tokens=24, num_return_sequences=16, do_sample=True, pad_token_id=0
    )


def _static(model: LlamaForCausalLM) -> object:
    return model.generate(
        TOKENS[:, :4].repeat(16, 1), max_new_tokens=16, min_new_tokens=16, cache_implementation="static", pad_token_id=0
    )


ODD = {
    "the layers alone": lambda model: model.model(TOKENS.repeat(8, 1)),
    "a static cache": _static,
    "one layer": lambda model: model.model.layers[0](
        torch.zeros(16, 64, 32), position_embeddings=(torch.zeros(1, 64, 8), torch.zeros(1, 64, 8))
    ),
    "hidden states": lambda model: model(TOKENS, logits_to_keep=1, output_hidden_states=True),
    "the head": lambda model: model.lm_head(torch.zeros(32, 64, 32)),
    "sequences returned together": _returned,
}
"""Calls that take more than planned, in ways that the arguments of one forward alone do not show."""


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@exact
@alike("name", [*ODD], first=2)
def test_odd_calls_keep_to_the_budget_or_end_in_one_error(name: str) -> None:
    model = llama().eval()
    whole = make_plan(model, {0: "1GB", "cpu": "1GB"}, context_length=64).devices[0]
    plan = make_plan(model, {0: whole.total - whole.weights // 2, "cpu": "1GB"}, context_length=64)
    budget = plan.devices[0].total
    plan = replace(plan, devices={**plan.devices, 0: replace(plan.devices[0], budget=budget)})
    dispatch_model(model, plan)
    reset_peak_memory(0)
    with torch.no_grad(), suppress(BudgetError):
        ODD[name](model)
    assert max_memory_allocated(0) <= budget
    assert torch.equal(last_scores(model), last_scores(llama().to(at(0)))), "the model is as it was"


def last_scores(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS.to(at(0)), logits_to_keep=1).logits.cpu()


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
