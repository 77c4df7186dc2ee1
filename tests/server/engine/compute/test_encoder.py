"""Encoders compute several texts in one forward, little of which is padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertForMaskedLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    RobertaConfig,
    RobertaModel,
)

from bigmodel.errors import ServeError
from bigmodel.server.engine.compute.encoder import EncoderRunner, generates, scores
from bigmodel.server.engine.sampling.pooling import PoolingParams
from bigmodel.server.engine.scheduling.request import Request, SamplingParams, Sequence
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens
from tests.server.encoders import cross_encoder, encoder, states
from tests.server.tiny import Collector, tiny_model


def sequence(prompt: list[int]) -> Sequence:
    params = SamplingParams(max_tokens=0, pooling=PoolingParams("mean"))
    return Request(str(prompt), prompt, params, Collector()).sequences[0]


def forwards(model: Any) -> list[tuple[int, ...]]:
    """Shapes of the inputs of each forward from now on."""
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def test_texts_of_similar_lengths_share_a_forward() -> None:
    model = encoder()
    shapes = forwards(model)
    given = [sequence([number] * length) for number, length in enumerate([5, 60, 6, 58, 5], start=1)]
    rows = EncoderRunner(model).run([ScheduledTokens(each, len(each)) for each in given])
    assert sorted(shapes) == [(2, 60), (3, 6)]
    for each, own in zip(given, rows, strict=True):
        assert own is not None
        torch.testing.assert_close(own, states(encoder(), each.request.prompt), rtol=1e-4, atol=1e-5)


def test_a_text_is_computed_when_its_end_is_reached() -> None:
    runner, text = EncoderRunner(encoder()), sequence([1, 2, 3])
    assert runner.run([ScheduledTokens(text, 2)]) == [None]
    text.computed = 2
    (rows,) = runner.run([ScheduledTokens(text, 1)])
    assert rows is not None
    assert len(rows) == 3


def test_which_models_generate_and_which_score() -> None:
    assert [generates(model) for model in (tiny_model(), encoder(), cross_encoder())] == [True, False, False]
    assert [scores(model) for model in (tiny_model(), encoder(), cross_encoder())] == [False, False, True]


def test_a_model_with_another_head_says_so() -> None:
    runner = EncoderRunner(encoder(BertForMaskedLM))
    with pytest.raises(ServeError, match="gives neither states nor scores"):
        runner.compute([sequence([1])])


SIZES: dict[str, Any] = {
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64},
}


def others(kind: str, pad: int | None) -> Any:
    """Models whose results depend on which token pads."""
    torch.manual_seed(0)
    if kind == "roberta":
        return RobertaModel(RobertaConfig(**SIZES, pad_token_id=pad)).eval()
    of = LlamaForSequenceClassification if kind == "classifier" else LlamaModel
    return of(LlamaConfig(**SIZES, num_labels=1, pad_token_id=pad)).eval()


@pytest.mark.parametrize("kind", ["roberta", "decoder", "classifier"])
@pytest.mark.parametrize("pad", [1, 7])
def test_padding_changes_nothing(kind: str, pad: int) -> None:
    check_alone_and_together(others(kind, pad), together=True)


@pytest.mark.parametrize("kind", ["decoder", "classifier"])
def test_without_a_token_that_pads(kind: str) -> None:
    check_alone_and_together(others(kind, None), together=kind == "decoder")


def check_alone_and_together(model: Any, *, together: bool) -> None:
    prompts = [[20, 30, 40, 50], [60, 70, 80], [90, 100, 110, 120]]
    with torch.no_grad():
        own = [model(input_ids=torch.tensor([prompt]))[0] for prompt in prompts]
    shapes = forwards(model)
    given = [sequence(prompt) for prompt in prompts]
    found = EncoderRunner(model).run([ScheduledTokens(each, len(each)) for each in given])
    assert len(shapes) == (1 if together else 3)
    for rows, expected in zip(found, own, strict=True):
        assert rows is not None
        torch.testing.assert_close(rows, expected.reshape(rows.shape), rtol=1e-4, atol=1e-5)
