"""Generations that are known to keep to the plan count as one forward; others run alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from bigmodel.dispatch.attach.generation import Generation
from bigmodel.plan import Plan

from ..models import llama

PLAN = Plan("Llama", "auto", 0, {}, (), batch_size=2, context_length=64)
MOST = 5
PROMPT = torch.zeros(2, 32, dtype=torch.long)


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(layers=1)


def forwards_of(model: Any, *args: Any, most: int = MOST, **kwargs: Any) -> int:
    return Generation(model, PLAN).forwards_of(args, kwargs, most)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 32},
        {"max_length": 64},
        {"max_new_tokens": 32, "do_sample": True, "temperature": 0.5},
        {"generation_config": GenerationConfig(max_new_tokens=32)},
        {"generation_config": GenerationConfig(max_new_tokens=99), "max_new_tokens": 32},
    ],
)
def test_one_of_the_planned_rows_and_tokens_counts_as_one(model: Any, arguments: dict[str, Any]) -> None:
    assert forwards_of(model, PROMPT, **arguments) == 1
    assert forwards_of(model, input_ids=PROMPT, **arguments) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 33},
        {"max_length": 65},
        {"max_new_tokens": 32, "num_beams": 2},
        {"max_new_tokens": 32, "num_return_sequences": 2, "do_sample": True},
        {"max_new_tokens": 32, "guidance_scale": 1.5},
        {"max_new_tokens": 32, "prompt_lookup_num_tokens": 3},
        {"max_new_tokens": 32, "assistant_model": object()},
        {"max_new_tokens": 32, "past_key_values": object()},
        {"generation_config": GenerationConfig(max_new_tokens=32, num_beams=2)},
    ],
)
def test_any_other_counts_as_all(model: Any, arguments: dict[str, Any]) -> None:
    assert forwards_of(model, PROMPT, **arguments) == MOST


def test_so_does_one_whose_size_is_not_known(model: Any) -> None:
    assert forwards_of(model, max_new_tokens=2) == MOST
    assert forwards_of(model, PROMPT, GenerationConfig(max_new_tokens=2)) == MOST
    assert forwards_of(model, torch.zeros(3, 4), max_new_tokens=2) == MOST


def test_where_one_runs_at_a_time_each_counts_as_one(model: Any) -> None:
    assert forwards_of(model, PROMPT, max_new_tokens=99, most=1) == 1


def test_one_in_continuous_batches_is_not_admitted_but_its_forwards_are(model: Any) -> None:
    assert forwards_of(model, PROMPT, max_new_tokens=2, cache_implementation="paged") == 0
