"""Encoders compute several texts in one forward, little of which is padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM

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
