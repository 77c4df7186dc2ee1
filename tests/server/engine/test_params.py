"""What a request asks for decides which way its tokens are chosen."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.server.engine import SamplingParams


def test_greedy_is_temperature_nought() -> None:
    assert SamplingParams(1, temperature=0.0).greedy
    assert not SamplingParams(1, temperature=0.1).greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {1: 2.0}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"grammar": object()},
    ],
)
def test_what_changes_the_logits(fields: dict[str, Any]) -> None:
    assert SamplingParams(1, **fields).adjusts_logits


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"logprobs": 5}])
def test_what_only_chooses_among_them(fields: dict[str, Any]) -> None:
    assert not SamplingParams(1, **fields).adjusts_logits
