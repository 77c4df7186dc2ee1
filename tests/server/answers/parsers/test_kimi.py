"""Calls as Kimi K2 writes them."""

from __future__ import annotations

import pytest

from bigmodel.server.answers.parsers.kimi import MARKS
from tests.server.answers.parsers.reading import Answer, form, read, special

PARIS = ("get_weather", {"city": "Paris"})


def call(head: str = "functions.get_weather:0", arguments: str = '{"city": "Paris"}') -> str:
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*calls: str) -> str:
    return MARKS.calls + "".join(calls) + MARKS.calls_end


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("hidden", [{}, special("kimi")])
def test_one_call_and_several(hidden: dict[str, int], streams: bool) -> None:
    how = form("kimi", special=hidden, streams=streams)
    assert read(how, f"I look. {section(call())}") == Answer("I look.", calls=[PARIS])
    both = section(call(), "\n", call("functions.get_time:1 ", "{}")).replace("\n", "")
    assert read(how, both) == Answer(calls=[PARIS, ("get_time", {})])
    assert read(how, section(call()).removesuffix(MARKS.calls_end)) == Answer(calls=[PARIS])


@pytest.mark.parametrize(
    "head", ["get_weather:3", "functions.get_weather", "get_weather", " functions.get_weather:12\n"]
)
def test_parts_of_the_identifier_may_be_missing(head: str) -> None:
    assert read(form("kimi"), section(call(head))) == Answer(calls=[PARIS])


def test_a_marker_within_a_string_is_text() -> None:
    text = section(call(arguments=f'{{"city": "{MARKS.call_end}"}}'), call())
    assert read(form("kimi"), text) == Answer(calls=[("get_weather", {"city": MARKS.call_end}), PARIS])


def test_reasoning_comes_first() -> None:
    text = f"Which city?</think>{section(call())}"
    assert read(form("kimi", "think", opened=True), text) == Answer("", "Which city?", [PARIS])
    assert read(form("kimi", "think", opened=True), section(call())) == Answer("", "", [PARIS])


@pytest.mark.parametrize(
    "text",
    [
        *(section(), section(call("functions.unknown:0")), section(call(arguments='{"city"')), section(call("0"))),
        *(section(call())[:60], MARKS.calls_end),
    ],
)
def test_malformed_calls_come_back_as_text(text: str) -> None:
    assert read(form("kimi"), text) == Answer(text)


def test_identifiers_have_the_name_and_count_the_calls_of_the_conversation() -> None:
    assert form("kimi").new_id("get_time", 0) == "functions.get_time:0"
    assert form("kimi", calls_before=3).new_id("get_time", 1) == "functions.get_time:4"
