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
from bigmodel.profile.trace.inputs import padding_mask, padding_of, parameters_of
from bigmodel.profile.trace.uses import uses_of

from ..examples import alike
from .families import FORWARD, GENERATING, HEARING, ROUTING, SEEING

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
    """Return the names of families as parameters of a test: the first of `kept` in every run, the others of them for
    `make long`, and all others for `make zoo`."""
    marks = {name: [pytest.mark.slow, pytest.mark.long] for name in kept} | {kept[0]: []}
    zoo = [pytest.mark.slow, pytest.mark.zoo]
    return [pytest.param(name, marks=marks.get(name, zoo)) for name in families]


def on_device(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return an input on the device; samples that have no values are zeros."""
    if value.device.type == "meta":
        value = torch.zeros(value.shape, dtype=dtype)
    return value.to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("family", some(FORWARD, "vit", "clip", "wav2vec2"))
def test_the_peak_of_a_forward_is_planned_to_the_byte(family: str) -> None:
    model = FORWARD[family]().eval()
    profile, predicted = planned(model)
    before = memory_allocated(DEVICE)
    model.to(DEVICE)
    for use in uses_of(model, profile.workload):
        given = use.record.keywords["inputs"]
        given = {**given, **padding_of(given, parameters_of(model))}
        inputs = {name: on_device(value, model.dtype) for name, value in given.items()}
        gc.collect()
        reset_peak_memory(DEVICE)
        with torch.inference_mode():
            try:
                model(**inputs)
            except (ValueError, IndexError, RuntimeError):  # a shape by another convention than this model's
                continue
        break
    assert max_memory_allocated(DEVICE) - before == predicted


def peak_of_generating(model: Any, new_tokens: int = NEW + 1, **inputs: torch.Tensor) -> int:
    """Return the peak bytes of a model on one device that generates from inputs; by default from a prompt of text."""
    before = memory_allocated(DEVICE)
    model.to(DEVICE)
    if not inputs:
        ids = torch.full((BATCH, PROMPT), 5)
        inputs = {"input_ids": ids, "attention_mask": padding_mask(*ids.shape)}
    inputs = {name: value.to(DEVICE) for name, value in inputs.items()}
    gc.collect()
    reset_peak_memory(DEVICE)
    asked = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": 10**6, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(**inputs, **asked)
    return max_memory_allocated(DEVICE) - before


@pytest.mark.slow
@pytest.mark.parametrize("family", some(GENERATING, "lfm2"))
def test_the_peak_of_generating_is_planned_to_the_byte(family: str) -> None:
    model = GENERATING[family]().eval()
    _, predicted = planned(model)
    assert peak_of_generating(model) == predicted


@pytest.mark.slow
@pytest.mark.parametrize("family", some(ROUTING, "switch"))
def test_the_peak_is_planned_for_any_choice_of_experts(family: str) -> None:
    model = ROUTING[family]().eval()
    _, predicted = planned(model)
    assert 0.85 * predicted <= peak_of_generating(model, NEW) <= predicted


IMAGE_TOKENS = {"gemma3": 4, "llava": 16, "qwen2_vl": 9}
"""Tokens of the prompt that stand for one image."""


def image_and_text(family: str) -> dict[str, torch.Tensor]:
    """Return what a processor would: a prompt for each sequence, with one image in it."""
    ids = torch.full((BATCH, PROMPT), 5)
    ids[:, 1 : 1 + IMAGE_TOKENS[family]] = 150
    kinds = (ids == 150).long()
    found = {"input_ids": ids, "attention_mask": padding_mask(*ids.shape)}
    if family == "qwen2_vl":
        grid = torch.tensor([[1, 6, 6]] * BATCH)
        patches = torch.zeros(BATCH * 36, 3 * 2 * 32 * 32)
        return {**found, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    extra = {"token_type_ids": kinds} if family == "gemma3" else {}
    return {**found, "pixel_values": torch.zeros(BATCH, 3, 32, 32), **extra}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", some(SEEING, "llava"))
def test_the_peak_of_generating_from_an_image_is_planned(family: str) -> None:
    """To the byte; `generate` encodes images of Qwen2-VL before its prompt is embedded, which takes less."""
    model = SEEING[family]().eval()
    _, predicted = planned(model)
    measured = peak_of_generating(model, **image_and_text(family))
    assert (0.95 if family == "qwen2_vl" else 1) * predicted <= measured <= predicted


@pytest.mark.slow
@pytest.mark.parametrize("family", some(HEARING, "whisper"))
@alike("new_tokens", [3, 40], first=1)
def test_the_peak_of_transcribing_is_planned_to_the_byte(family: str, new_tokens: int) -> None:
    model = HEARING[family]().eval()
    profile = profile_model(
        model, batch_size=BATCH, context_length=new_tokens, new_tokens=new_tokens, device_type="virtual"
    )
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    assert peak_of_generating(model, new_tokens, input_features=torch.zeros(BATCH, 16, 100)) == predicted


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
