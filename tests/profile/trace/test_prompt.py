"""Prompts with placeholders for the features of an image."""

from __future__ import annotations

import pytest
import transformers as t
from torch import nn

from bigmodel.profile import profile_model
from bigmodel.profile.trace.inputs import parse_inputs

from ..models import on_meta


def llava() -> nn.Module:
    text = t.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )  # fmt: skip
    vision = t.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
    )  # fmt: skip
    config = t.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63)
    return on_meta(t.LlavaForConditionalGeneration, config)


@pytest.mark.slow
def test_a_vision_language_model_gets_an_image_with_its_prompt() -> None:
    profile = profile_model(llava(), context_length=20, new_tokens=2)
    assert [phase.name for phase in profile.phases] == ["prefill", "decode"]
    assert profile.phases[0].tokens == 18  # 16 patches, and a token before and behind them
    assert profile.unknown == ""
    ran = {profile.units[unit].name for unit in profile.phases[0].trace.order()}
    assert any("vision" in name for name in ran)


@pytest.mark.slow
def test_sample_shapes_determine_prompt_length_and_image_size() -> None:
    shapes = parse_inputs(["input_ids=2x40", "pixel_values=2x3x16x16"])
    profile = profile_model(llava(), context_length=64, new_tokens=1, sample_inputs=shapes)
    assert profile.workload.batch_size == 2
    assert profile.phases[0].tokens == 40


@pytest.mark.slow
def test_a_model_below_its_head_gets_placeholders_too() -> None:
    profile = profile_model(llava().model, context_length=20)
    assert profile.unknown == ""
    ran = {profile.units[unit].name for unit in profile.phases[0].trace.order()}
    assert any("vision" in name for name in ran)
