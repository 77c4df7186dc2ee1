"""Modules whose keys and values grow with the context."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import MistralConfig, MistralForCausalLM, T5Config, T5ForConditionalGeneration

from bigmodel.profile.model.growing import growing_layers, layer_indices

from ..models import on_meta, tiny_llama

NAMES = ["model.embed_tokens", "model.layers.0", "model.layers.3", "lm_head"]


def test_the_layers_of_a_cache_are_found_in_the_module() -> None:
    model: Any = tiny_llama()
    assert layer_indices(model.model.layers[2]) == {2}
    assert layer_indices(model.lm_head) == set()


def test_layers_of_full_attention_grow() -> None:
    assert growing_layers(tiny_llama(), NAMES) == {"model.layers.0", "model.layers.3"}


def test_layers_with_a_window_do_not() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = MistralConfig(**sizes, vocab_size=96, sliding_window=8)
    assert not growing_layers(on_meta(MistralForCausalLM, config), NAMES)


def test_nor_those_of_models_with_an_encoder_and_of_other_modules() -> None:
    config = T5Config(d_model=32, d_ff=32, num_layers=2, num_heads=2, vocab_size=96)
    assert not growing_layers(on_meta(T5ForConditionalGeneration, config), ["decoder.block.0"])
    assert not growing_layers(nn.Linear(2, 2), [""])
