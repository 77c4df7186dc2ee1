"""The choice of the next token is planned as the generation config has it: to the byte where it takes most."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers as t

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile import profile_model
from bigmodel.profile.trace.inputs import padding_mask

from ...examples import alike

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = "virtual:0"
BATCH, PROMPT, NEW, VOCABULARY = 2, 12, 4, 20_000
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip


def predicted_and_measured(**settings: Any) -> tuple[int, int]:
    """Return the planned and the measured peak bytes of generating with a generation config."""
    torch.manual_seed(0)
    model = t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).eval()
    model.generation_config.update(eos_token_id=10**6, pad_token_id=0, **settings)
    profile = profile_model(model, batch_size=BATCH, context_length=PROMPT + NEW, new_tokens=NEW, device_type="virtual")
    before = memory_allocated(DEVICE)
    model.to(DEVICE)
    ids, mask = torch.full((BATCH, PROMPT), 5).to(DEVICE), padding_mask(BATCH, PROMPT).to(DEVICE)
    gc.collect()
    reset_peak_memory(DEVICE)
    with torch.inference_mode():
        model.generate(ids, attention_mask=mask, max_new_tokens=NEW + 1)
    return profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0], max_memory_allocated(
        DEVICE
    ) - before


@pytest.mark.slow
@alike(
    "settings",
    [
        {"do_sample": True, "top_k": 0, "min_p": 0.1},
        {"do_sample": False, "no_repeat_ngram_size": 3},
        {"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9},
        {"do_sample": False, "suppress_tokens": [3, 4]},
        {"do_sample": False},
        {"do_sample": True},
    ],
    first=1,
)
def test_the_peak_of_generating_is_predicted_to_the_byte(settings: dict[str, Any]) -> None:
    predicted, measured = predicted_and_measured(**settings)
    assert measured == predicted


@alike("settings", [{"num_beams": 2, "do_sample": True}, {"num_beams": 3}], first=1)
@pytest.mark.slow
def test_beams_are_planned_as_texts_of_their_own(settings: dict[str, Any]) -> None:
    predicted, measured = predicted_and_measured(**{"do_sample": False, **settings})
    assert 0.95 * predicted <= measured <= predicted


@pytest.mark.long
@pytest.mark.slow
def test_beams_of_an_encoder_decoder_share_the_encoder() -> None:
    torch.manual_seed(0)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 4000}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2}
    model = t.BartForConditionalGeneration(t.BartConfig(**layers, **sizes, **special)).eval()
    model.generation_config.update(eos_token_id=10**6, forced_eos_token_id=None, num_beams=4)
    profile = profile_model(model, batch_size=BATCH, context_length=PROMPT + NEW, new_tokens=NEW, device_type="virtual")
    before = memory_allocated(DEVICE)
    model.to(DEVICE)
    held = memory_allocated(DEVICE) - before
    ids, mask = torch.full((BATCH, PROMPT), 5).to(DEVICE), padding_mask(BATCH, PROMPT).to(DEVICE)
    gc.collect()
    reset_peak_memory(DEVICE)
    with torch.inference_mode():
        model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    predicted = profile.dynamic_peaks({}, main=0)[0]
    assert 0.95 * predicted <= max_memory_allocated(DEVICE) - before - held <= predicted


@pytest.mark.slow
@alike("settings", [{"min_new_tokens": 5}, {"repetition_penalty": 1.1}], first=1)
def test_what_keeps_a_few_tokens_of_its_own_is_predicted_but_for_one_number(settings: dict[str, Any]) -> None:
    predicted, measured = predicted_and_measured(do_sample=False, **settings)
    assert abs(measured - predicted) <= torch.long.itemsize


@pytest.mark.slow
def test_a_model_that_has_no_settings_is_planned_as_before() -> None:
    model = t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).eval()
    model.generation_config = None
    profile = profile_model(model, batch_size=BATCH, context_length=PROMPT + NEW, new_tokens=NEW, device_type="virtual")
    assert profile.unknown == ""
    assert [phase.name for phase in profile.phases] == ["prefill", "decode"]
