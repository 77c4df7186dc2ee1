"""Peaks of tiny models of many families on the virtual accelerator: measured against planned."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, get_plan
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile import Profile, profile_model
from bigmodel.profile.trace.uses import uses_of

from .families import FORWARD, GENERATING

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = "virtual:0"
BATCH, PROMPT, NEW = 2, 45, 3


def planned(model: Any) -> tuple[Profile, int]:
    """Return the profile of a model, and the peak bytes that it predicts where all is on one device."""
    profile = profile_model(model, batch_size=BATCH, context_length=PROMPT + NEW, new_tokens=NEW, device_type="virtual")
    assert profile.phases
    assert profile.unknown == ""
    return profile, profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]


def some(families: dict[str, Any], *kept: str) -> list[Any]:
    """Return the names of families as parameters of a test: the first of `kept` in every run, the others of them where
    slow tests run, and all others for `make zoo`."""
    marks = {name: [pytest.mark.slow] for name in kept} | {kept[0]: []}
    zoo = [pytest.mark.slow, pytest.mark.zoo]
    return [pytest.param(name, marks=marks.get(name, zoo)) for name in families]


def on_device(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return an input on the device; samples that have no values are zeros."""
    if value.device.type == "meta":
        value = torch.zeros(value.shape, dtype=dtype)
    return value.to(DEVICE)


@pytest.mark.parametrize("family", some(FORWARD, "vit", "clip", "wav2vec2"))
def test_the_peak_of_a_forward_is_planned_to_the_byte(family: str) -> None:
    model = FORWARD[family]().eval()
    profile, predicted = planned(model)
    before = memory_allocated(DEVICE)
    model.to(DEVICE)
    for use in uses_of(model, profile.workload):
        inputs = {name: on_device(value, model.dtype) for name, value in use.record.keywords["inputs"].items()}
        gc.collect()
        reset_peak_memory(DEVICE)
        with torch.inference_mode():
            try:
                model(**inputs)
            except (ValueError, IndexError, RuntimeError):  # a shape by another convention than this model's
                continue
        break
    assert max_memory_allocated(DEVICE) - before == predicted


def peak_of_generating(model: Any) -> int:
    before = memory_allocated(DEVICE)
    model.to(DEVICE)
    ids = torch.full((BATCH, PROMPT), 5).to(DEVICE)
    gc.collect()
    reset_peak_memory(DEVICE)
    asked = {"max_new_tokens": NEW + 1, "do_sample": False, "eos_token_id": 10**6, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    return max_memory_allocated(DEVICE) - before


@pytest.mark.parametrize("family", some(GENERATING, "lfm2", "bamba", "mamba"))
def test_the_peak_of_generating_is_planned_to_the_byte(family: str) -> None:
    model = GENERATING[family]().eval()
    _, predicted = planned(model)
    assert peak_of_generating(model) == predicted


def test_a_module_of_no_convention_keeps_its_budget_with_sample_inputs() -> None:
    """Under this budget its weights alone would fit the device: with its activations they do not."""
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(6)))
    inputs = torch.zeros(4, 8, 32, 32)
    budget = 4 * inputs.nbytes + sum(parameter.nbytes for parameter in model.parameters()) // 2
    before = memory_allocated(DEVICE)
    dispatch_model(model, "auto", max_memory={0: budget, "cpu": "1GB"}, sample_inputs=inputs)
    plan = get_plan(model)
    assert plan is not None
    assert plan.streamed
    given = inputs.to(DEVICE)
    gc.collect()
    reset_peak_memory(DEVICE)
    with torch.inference_mode():
        model(given)
    assert 0.9 * plan.devices[0].total <= max_memory_allocated(DEVICE) - before <= plan.devices[0].total <= budget
