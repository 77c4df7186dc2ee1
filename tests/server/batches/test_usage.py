"""The tokens of a batch are those that its answers say, whatever route they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigmodel.server.batches.answers import Answered, AnswerFiles
from bigmodel.server.batches.usage import BatchUsage, usage_of
from tests.server.batches.making import batch, file_store

CHAT = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
RESPONSE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2},
}
ALL = BatchUsage(input_tokens=9, cached_tokens=4, output_tokens=5, reasoning_tokens=2)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"choices": [], "usage": CHAT}, ALL),
        ({"usage": RESPONSE, "error": None}, ALL),
        ({"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}}, BatchUsage(input_tokens=3)),
        ({"text": '"usage": {"prompt_tokens": 7}', "é": 1}, BatchUsage()),
        ({"usage": None}, BatchUsage()),
        ({"usage": {"prompt_tokens": "many"}}, BatchUsage()),
        ({}, BatchUsage()),
    ],
)
def test_the_usage_of_an_answer_is_found(body: Any, usage: BatchUsage) -> None:
    for separators in ((", ", ": "), (",", ":")):
        assert usage_of(json.dumps(body, separators=separators).encode()) == usage


def test_an_answer_that_is_cut_says_nothing() -> None:
    assert usage_of(b'{"usage": {"prompt_tok') == BatchUsage()


def test_answers_are_added_up_also_by_a_later_run(tmp_path: Path) -> None:
    made, files = batch(), file_store(tmp_path)
    body = json.dumps({"usage": CHAT}).encode()
    first = AnswerFiles(files, made)
    first.add(0, "a", Answered(200, "r", body))
    first.add(1, "b", Answered(400, "r", body))
    assert first.usage == ALL
    first.close()
    later = AnswerFiles(files, made)
    later.add(2, "c", Answered(200, "r", body))
    assert later.usage == ALL + ALL
    later.close()


def test_clients_see_the_sum() -> None:
    assert batch().view()["usage"] is None
    assert batch(usage=ALL).view()["usage"] == {**RESPONSE, "total_tokens": 14}
