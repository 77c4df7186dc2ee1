"""Calls as Llama 4 writes them."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read, special

START, END = "<|python_start|>", "<|python_end|>"
PARIS = ("get_weather", {"city": "Paris", "days": 3})
LIST = "[get_weather(city='Paris', days=3)]"
JSON = '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'


@pytest.mark.parametrize("call", [LIST, JSON])
@pytest.mark.parametrize("hidden", [{}, special("llama4")])
def test_calls_as_the_answer_or_between_markers(call: str, hidden: dict[str, int]) -> None:
    how = form("llama4", special=hidden)
    for text in (call, f"\n{call}", f"{START}{call}{END}", f"{START}{call}", f"{START} {call} {END}"):
        assert read(how, text) == Answer(calls=[PARIS])
    assert read(how, f"I look.\n{START}{call}{END} Done.") == Answer("I look. Done.", calls=[PARIS])


def test_several_calls() -> None:
    wanted = Answer(calls=[PARIS, ("get_time", {})])
    assert read(form("llama4"), f"{START}{LIST[:-1]}, get_time()]{END}") == wanted
    assert read(form("llama4"), f"{START}{LIST}{END}{START}[get_time()]{END}") == wanted


def test_a_marker_within_a_string_is_text() -> None:
    wanted = Answer(calls=[("get_time", {"zone": END})])
    for call in (f"[get_time(zone='{END}')]", f'{{"name": "get_time", "parameters": {{"zone": "{END}"}}}}'):
        assert read(form("llama4"), f"{START}{call}{END}") == wanted


@pytest.mark.parametrize(
    "text", ["It rains.", f"{START}[unknown()]{END}", f"{START}print(1){END}", f"a {END}", START, LIST[:-1], "[1, 2]"]
)
def test_other_texts_are_content(text: str) -> None:
    assert read(form("llama4"), text) == Answer(text)
