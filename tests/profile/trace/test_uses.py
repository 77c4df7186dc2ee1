"""The uses that are recorded of a model, by the conventions of its library."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile import profile_model, profile_units
from bigmodel.profile.trace.dry_run import dry_run
from bigmodel.profile.trace.workload import Workload
from tests.zoo.families import OTHERS

from ...examples import alike
from ..models import Flat, on_meta, tiny_llama


def phases(model: nn.Module, **shapes: Any) -> list[tuple[str, int]]:
    """Names and tokens of the forwards that a model is used by."""
    workload = Workload(**{"context_length": 8, "new_tokens": 2, **shapes})
    return [(phase.name, phase.tokens) for phase in dry_run(model, profile_units(model), workload, torch.device("cpu"))]


def bert() -> nn.Module:
    config = t.BertConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return on_meta(t.BertForMaskedLM, config)


def vit() -> nn.Module:
    config = t.ViTConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return on_meta(t.ViTModel, config)


def whisper() -> nn.Module:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64, "max_source_positions": 20}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    return on_meta(t.WhisperForConditionalGeneration, t.WhisperConfig(**sizes, **heads, **ids))


@pytest.mark.slow
def test_a_decoder_generates() -> None:
    assert phases(tiny_llama()) == [("prefill", 6), ("decode", 1)]


def test_a_decoder_below_its_head_does_not_generate() -> None:
    assert phases(on_meta(t.GPT2Model, t.GPT2Config(n_embd=32, n_layer=1, n_head=2))) == [("forward", 8)]


@pytest.mark.slow
def test_a_decoder_without_a_cache_and_an_encoder_of_texts_see_the_whole_context_at_once() -> None:
    assert phases(tiny_llama(), cache=None) == phases(bert()) == [("forward", 8)]


CLASSIFIERS = {
    "t5": (t.T5ForSequenceClassification, t.T5Config(d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=1)),
    "bart": (
        t.BartForSequenceClassification,
        t.BartConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
            encoder_attention_heads=2, decoder_attention_heads=2,
        ),
    ),
}  # fmt: skip


@pytest.mark.slow
@alike("family", [*CLASSIFIERS], first=1)
def test_classifiers_that_look_for_the_end_of_a_text_are_given_one(family: str) -> None:
    kind, config = CLASSIFIERS[family]
    config.decoder_start_token_id = 0
    assert phases(on_meta(kind, config)) == [("forward", 8)]


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@alike("family", [*CLASSIFIERS], first=1)
def test_classifiers_of_texts_take_what_is_planned(family: str) -> None:
    kind, config = CLASSIFIERS[family]
    config.decoder_start_token_id = 0
    model = kind(config).eval()
    profile = profile_model(model, batch_size=2, context_length=64, device_type="virtual")
    model.to("virtual:0")
    ids = torch.full((2, 64), 5)
    ids[:, -1] = config.eos_token_id
    ids = ids.to("virtual:0")
    gc.collect()
    reset_peak_memory(0)
    with torch.inference_mode():
        model(input_ids=ids)
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    assert 0.9 * predicted <= max_memory_allocated(0) <= predicted


class NoSecondForward(t.LlamaForCausalLM):
    """Cannot be run with keys and values of earlier tokens."""

    def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None:
            raise AttributeError("has no attribute that forwards with a cache read")
        return super().forward(input_ids, **kwargs)


def test_a_generation_that_cannot_be_recorded_is_not_counted_as_one_forward_without_a_word() -> None:
    model = NoSecondForward(tiny_llama().config)
    profile = profile_model(model, context_length=8, new_tokens=2)
    assert profile.unknown.startswith("memory is known for inputs without a KV cache; give sample_inputs")
    assert sum(profile.kv_cache) == 0


@pytest.mark.slow
def test_images_need_no_context_and_sounds_are_transcribed() -> None:
    assert phases(vit(), context_length=0, new_tokens=0) == [("forward", 1)]
    assert [name for name, _ in phases(whisper())] == ["prefill", "decode"]


@pytest.mark.slow
def test_the_places_of_a_text_are_given_to_an_encoder_that_takes_them() -> None:
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 64}
    config = t.UdopConfig(**sizes, image_size=32, patch_size=8, decoder_start_token_id=0)
    model = on_meta(t.UdopForConditionalGeneration, config)
    assert phases(model) == [("prefill", 6), ("decode", 1)]
    assert "without images" in profile_model(model, context_length=8, new_tokens=2).unknown


def test_inputs_that_a_config_does_not_describe_are_not_guessed() -> None:
    model = tiny_llama()
    model.main_input_name = "voltages"
    assert phases(model) == phases(Flat()) == phases(tiny_llama(), context_length=0, new_tokens=0) == []


def test_any_model_runs_on_an_example() -> None:
    model, workload = Flat(), Workload()
    found = dry_run(model, profile_units(model), workload, torch.device("cpu"), example=((torch.ones(2, 3),), {}))
    assert [(phase.name, phase.tokens) for phase in found] == [("forward", 1)]


@pytest.mark.usefixtures("accelerators")
@pytest.mark.long
@pytest.mark.slow
def test_a_model_that_has_its_language_model_generate_is_planned_with_keys_and_values() -> None:
    model: Any = OTHERS["blip-2"]().eval()
    model.generation_config.update(eos_token_id=10**6, pad_token_id=0)
    profile = profile_model(model, batch_size=2, context_length=40, new_tokens=16, device_type="virtual")
    assert [phase.name for phase in profile.phases] == ["prefill", "decode"]
    assert sum(profile.kv_cache) == 2 * 2 * 2 * 40 * 64 * 4  # layers, keys and values, texts, tokens, width, bytes
    before = memory_allocated(0)
    model.to("virtual:0")
    ids = torch.full((2, 24), 5)
    ids[:, :8] = 150
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.zeros(2, 3, 32, 32)}
    inputs = {name: value.to("virtual:0") for name, value in inputs.items()}
    gc.collect()
    reset_peak_memory(0)
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=16, do_sample=False)
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    assert max_memory_allocated(0) - before <= predicted
