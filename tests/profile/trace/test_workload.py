from __future__ import annotations

import pytest
import transformers as t
from torch import nn

from bigmodel.errors import PlanError
from bigmodel.profile import Workload
from bigmodel.profile.trace.workload import DEFAULT_CONTEXT, max_context, text_config, trained_length, used_length

from ..models import Flat, tiny_llama


def test_the_prompt_is_the_context_less_new_tokens() -> None:
    assert Workload(context_length=100, new_tokens=30).prompt_length == 70


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("batch_size", {"batch_size": 0, "context_length": 4}),
        ("context_length", {"context_length": -1}),
        ("new_tokens", {"context_length": 4, "new_tokens": 5}),
        ("cache", {"context_length": 4, "cache": "paged"}),
        ("padded", {"padded": "left"}),
        ("batch_size 1000000 and context_length 64", {"batch_size": 10**6, "context_length": 64}),
    ],
)
def test_invalid_shapes_are_refused_by_name(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=field):
        Workload(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [used_length, trained_length])
def test_the_default_length_is_limited_by_the_model(length: object) -> None:
    assert length(tiny_llama(max_position_embeddings=100), None) == 100  # type: ignore[operator]
    assert length(tiny_llama(max_position_embeddings=9999), None) == DEFAULT_CONTEXT  # type: ignore[operator]


def test_a_length_beyond_the_models_limit_is_refused() -> None:
    assert used_length(tiny_llama(), 512) == 512
    with pytest.raises(PlanError, match=r"513.*512"):
        used_length(tiny_llama(), 513)


def test_a_model_without_a_config_has_no_length_in_inference_and_the_default_in_training() -> None:
    assert (used_length(Flat(), None), trained_length(Flat(), None)) == (0, DEFAULT_CONTEXT)
    assert used_length(Flat(), 10**6) == 10**6


@pytest.mark.parametrize("limit", [0, -1])
def test_a_config_without_a_limit_has_no_max_context(limit: object) -> None:
    model = tiny_llama()
    model.config.max_position_embeddings = limit
    assert max_context(model) is None
    assert max_context(nn.Linear(2, 2)) is None


def test_decoders_of_sounds_name_their_limit_otherwise() -> None:
    model = nn.Module()
    model.config = t.WhisperConfig(max_target_positions=40)  # type: ignore[assignment]
    assert max_context(model) == 40
    with pytest.raises(PlanError, match=r"41.*40"):
        used_length(model, 41)


def test_of_several_text_configs_the_decoders_counts() -> None:
    parts = {"text_encoder": t.T5Config(), "audio_encoder": t.EncodecConfig(), "decoder": t.MusicgenDecoderConfig()}
    config = t.MusicgenConfig(**parts)
    assert text_config(config) is config.decoder
    assert text_config(config.decoder) is config.decoder
