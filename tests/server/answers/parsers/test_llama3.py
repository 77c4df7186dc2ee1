"""Calls as Llama 3.1, 3.2 and 3.3 write them."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read, special

CALL = '{"name": "get_weather", "parameters": {"city": "Paris {FR}"}}'
PARIS = ("get_weather", {"city": "Paris {FR}"})
TAG = "<|python_tag|>"


@pytest.mark.parametrize("text", [CALL, f"{TAG}{CALL}", f"\n\n{CALL}", CALL.replace("parameters", "arguments")])
def test_the_answer_is_a_call(text: str) -> None:
    assert read(form("llama3", special=special("llama3")), text) == Answer(calls=[PARIS])


def test_several_calls_stand_one_after_another() -> None:
    assert read(form("llama3"), f"{CALL}; {CALL}\n{CALL}") == Answer(calls=[PARIS] * 3)


def test_text_after_a_call_is_content() -> None:
    assert read(form("llama3"), f"{CALL}; That is all.") == Answer("; That is all.", calls=[PARIS])


@pytest.mark.parametrize(
    "text",
    [
        "It rains.",
        '{"answer": 42} is the answer',
        f"The call is {CALL}",
        CALL[:-1],
        '{"name": "unknown", "parameters": {}}',
        f'{TAG}print("a")',
    ],
)
def test_other_texts_are_content(text: str) -> None:
    assert read(form("llama3"), text) == Answer(text)


def test_the_tag_is_not_shown_where_it_is_a_special_token() -> None:
    assert read(form("llama3", special=special("llama3")), f'{TAG}print("a")') == Answer('print("a")')
