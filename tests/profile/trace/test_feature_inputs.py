"""Features that another model has computed, as inputs: shapes by the config, and memory as it is planned."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.profile import profile_model
from bigmodel.profile.trace.feature_inputs import LATENT_FRAMES, PATCHES, QUERIES, REGIONS, feature_inputs

from ..models import tiny_llama

BERT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
MODELS: dict[str, tuple[Any, Any]] = {
    "decision_transformer": (
        t.DecisionTransformerModel,
        t.DecisionTransformerConfig(state_dim=5, act_dim=3, hidden_size=32, n_layer=2, n_head=2, n_positions=96),
    ),
    "lxmert": (
        t.LxmertModel,
        t.LxmertConfig(**BERT, l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16, max_position_embeddings=64),
    ),
    "perceiver": (
        t.PerceiverModel,
        t.PerceiverConfig(num_latents=8, d_latents=32, d_model=16, num_self_attends_per_block=2,
                          num_self_attention_heads=2, num_cross_attention_heads=2),
    ),
    "qformer": (
        t.Blip2QFormerModel,
        t.Blip2QFormerConfig(**BERT, num_hidden_layers=2, encoder_hidden_size=24),
    ),
}  # fmt: skip


def made(family: str) -> Any:
    kind, config = MODELS[family]
    torch.manual_seed(0)
    return kind(config).eval()


def shapes(family: str, tokens: int) -> dict[str, tuple[int, ...]]:
    (inputs,) = feature_inputs(made(family), 2, tokens)
    return {name: tuple(value.shape) for name, value in inputs.items()}


def test_an_agent_has_three_tokens_for_a_step() -> None:
    assert shapes("decision_transformer", tokens=10)["states"] == (2, 10, 5)
    assert shapes("decision_transformer", tokens=64)["states"] == (2, 32, 5)


def test_sizes_are_those_of_the_config() -> None:
    found = shapes("lxmert", tokens=100)
    assert found == {"input_ids": (2, 64), "visual_feats": (2, REGIONS, 16), "visual_pos": (2, REGIONS, 4)}
    assert shapes("perceiver", tokens=7) == {"inputs": (2, 7, 16)}
    found = shapes("qformer", tokens=7)
    assert found == {"query_embeds": (2, QUERIES, 32), "encoder_hidden_states": (2, PATCHES, 24)}


def test_a_forward_that_needs_embeddings_alone_gets_them() -> None:
    class Embedded(nn.Module):
        config = SimpleNamespace(hidden_size=6)

        def forward(self, inputs_embeds: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> None: ...

    (inputs,) = feature_inputs(Embedded(), 2, 5)
    assert inputs["inputs_embeds"].shape == (2, 5, 6)


def test_latents_are_tried_in_each_width_that_the_config_names() -> None:
    class Decoder(nn.Module):
        config = SimpleNamespace(latent_dim=4, hidden_size=8)

        def forward(self, latents: torch.Tensor) -> None: ...

    assert [inputs["latents"].shape[1:] for inputs in feature_inputs(Decoder(), 1, 0)] == [
        (4, LATENT_FRAMES),
        (8, LATENT_FRAMES),
    ]


def test_models_of_texts_take_no_features() -> None:
    assert list(feature_inputs(tiny_llama(), 1, 8)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("family", MODELS)
def test_features_take_what_is_planned(family: str) -> None:
    model = made(family)
    profile = profile_model(model, batch_size=2, context_length=32, device_type="virtual")
    (inputs,) = feature_inputs(model, 2, 32)
    model.to("virtual:0")
    given = {
        name: value.to("virtual:0") if value.device.type != "meta" else torch.rand(value.shape).to("virtual:0")
        for name, value in inputs.items()
    }
    gc.collect()
    reset_peak_memory(0)
    with torch.inference_mode():
        model(**given)
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    assert 0.9 * predicted <= max_memory_allocated(0) <= predicted
