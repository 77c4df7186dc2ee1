from __future__ import annotations

import pytest
import transformers as t
from torch import nn

from bigmodel.errors import PlanError
from bigmodel.profile import Workload
from bigmodel.profile.trace.workload import DEFAULT_CONTEXT, max_context, text_config, trained_length, used_length

from ..models import Flat, tiny_llama


def test_the_prompt_is_what_is_not_generated() -> None:
    assert Workload(context_length=100, new_tokens=30).prompt_length == 70


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("batch_size", {"batch_size": 0, "context_length": 4}),
        ("context_length", {"context_length": -1}),
        ("new_tokens", {"context_length": 4, "new_tokens": 5}),
        ("cache", {"context_length": 4, "cache": "paged"}),
    ],
)
def test_shapes_that_make_no_sense_are_refused_by_name(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=field):
        Workload(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [used_length, trained_length])
def test_without_a_wish_it_is_a_default_as_far_as_the_model_allows(length: object) -> None:
    assert length(tiny_llama(max_position_embeddings=100), None) == 100  # type: ignore[operator]
    assert length(tiny_llama(max_position_embeddings=9999), None) == DEFAULT_CONTEXT  # type: ignore[operator]


def test_no_more_is_used_than_the_model_allows() -> None:
    assert used_length(tiny_llama(), 512) == 512
    with pytest.raises(PlanError, match=r"513.*512"):
        used_length(tiny_llama(), 513)


def test_a_model_that_says_nothing_is_not_run_in_use_and_trained_on_the_default() -> None:
    assert (used_length(Flat(), None), trained_length(Flat(), None)) == (0, DEFAULT_CONTEXT)
    assert used_length(Flat(), 10**6) == 10**6


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_none_is_none(limit: object) -> None:
    model = tiny_llama()
    model.config.max_position_embeddings = limit
    assert max_context(model) is None
    assert max_context(nn.Linear(2, 2)) is None


def test_of_several_text_configs_the_decoders_counts() -> None:
    parts = {"text_encoder": t.T5Config(), "audio_encoder": t.EncodecConfig(), "decoder": t.MusicgenDecoderConfig()}
    config = t.MusicgenConfig(**parts)
    assert text_config(config) is config.decoder
    assert text_config(config.decoder) is config.decoder
