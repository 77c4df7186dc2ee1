"""Calls as Mistral's models write them, in both of their forms."""

from __future__ import annotations

import pytest

from bigmodel.server.answers.parsers.mistral import new_id
from tests.server.answers.parsers.reading import Answer, form, read, special

PARIS = ("get_weather", {"city": "Paris [FR]"})
LISTED = '{"name": "get_weather", "arguments": {"city": "Paris [FR]"}}'


@pytest.mark.parametrize(
    "text",
    [
        f"[TOOL_CALLS][{LISTED}]",
        f"[TOOL_CALLS] [{LISTED}]",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris [FR]"}',
        '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris [FR]"}',
    ],
)
@pytest.mark.parametrize("hidden", [False, True])
def test_one_call_in_each_form(text: str, hidden: bool) -> None:
    how = form("mistral", special=special("mistral") if hidden else {})
    assert read(how, text) == Answer(calls=[PARIS])
    assert read(how, f"I look.\n{text}") == Answer("I look.", calls=[PARIS])


def test_several_calls() -> None:
    named = '[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Paris [FR]"}'
    assert read(form("mistral"), named) == Answer(calls=[("get_time", {}), PARIS])
    assert read(form("mistral"), f"[TOOL_CALLS][{LISTED},\n {LISTED}]") == Answer(calls=[PARIS] * 2)


def test_the_calls_of_a_list_are_given_one_by_one() -> None:
    parser = form("mistral").parser()
    assert len(parser.push(f"[TOOL_CALLS][{LISTED}")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] what?",
        "[TOOL_CALLS][1, 2]",
        '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]',
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS]get_time[ARGS]now",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Par',
        "[TOOL_CALLS][ARGS]{}",
    ],
)
def test_malformed_calls_come_back_as_text(text: str) -> None:
    assert read(form("mistral"), text) == Answer(text)
    shown = text
    for marker in special("mistral"):
        shown = shown.replace(marker, "")
    assert read(form("mistral", special=special("mistral")), text).content.strip() == shown.strip()


def test_identifiers_have_the_form_that_templates_ask_for() -> None:
    ids = {new_id("f", 0) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids)
