"""Calls as glm-4-9b-chat and GLM-4-0414 write them."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read, special

CALL = 'get_weather\n{"city": "Paris"}'
PARIS = ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("streams", [False, True])
def test_the_first_line_is_a_function(streams: bool) -> None:
    how = form("glm4", streams=streams)
    for text in (CALL, f"\n{CALL}\n", CALL.replace("\n", "\n ")):
        assert read(how, text) == Answer(calls=[PARIS])
    assert read(how, f"{CALL}\nDone.") == Answer("\nDone.", calls=[PARIS])


@pytest.mark.parametrize("hidden", [{}, special("glm4")])
def test_further_calls_follow_a_marker(hidden: dict[str, int]) -> None:
    how = form("glm4", special=hidden)
    assert read(how, f"{CALL}<|assistant|>get_time\n{{}}") == Answer(calls=[PARIS, ("get_time", {})])
    assert read(how, f"I look.<|assistant|>{CALL}") == Answer("I look.", calls=[PARIS])


@pytest.mark.parametrize(
    "text",
    [
        *("get_weather", "get_weather\n", "get_weather\nis a function", 'get_weather {"city": "Paris"}'),
        *(f"I call {CALL}", 'unknown\n{"city": "Paris"}', CALL[:-1], "get_weather\n[1]", "a<|assistant|>b"),
    ],
)
def test_other_texts_are_content(text: str) -> None:
    assert read(form("glm4"), text) == Answer(text)


def test_text_is_not_held_back_where_no_function_begins() -> None:
    assert form("glm4").parser().push("get_over it")
