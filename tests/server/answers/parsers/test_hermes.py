"""Calls as Qwen 2.5, Qwen 3 and Hermes write them."""

from __future__ import annotations

import json

import pytest

from tests.examples import alike
from tests.server.answers.parsers.reading import Answer, form, read, special

ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, \\"FR\\"", "days": 3}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
PARIS = ("get_weather", {"city": 'Paris, "FR"', "days": 3})


def test_one_call_and_several() -> None:
    assert read(form("hermes"), ONE) == Answer(calls=[PARIS])
    assert read(form("hermes"), f"{ONE}\n{OTHER}") == Answer(calls=[PARIS, ("get_time", {})])


def test_text_before_a_call() -> None:
    assert read(form("hermes"), f"I look it up.\n\n{ONE}") == Answer("I look it up.", calls=[PARIS])


def test_the_last_tag_may_be_missing() -> None:
    assert read(form("hermes"), ONE.removesuffix("</tool_call>")) == Answer(calls=[PARIS])


@pytest.mark.slow
@pytest.mark.parametrize("again", ["<tool_call>", "<tool_call>\n<tool_call>", "\n<tool_call>\n<tool_call>\n"])
def test_the_first_tag_may_stand_where_the_last_should_or_twice(again: str) -> None:
    for call in (ONE, '<tool_call>{"arguments": {"city": "Paris, \\"FR\\"", "days": 3}, "name": "get_weather"}'):
        text = call.removesuffix("</tool_call>") + again + OTHER.removeprefix("<tool_call>")
        assert read(form("hermes"), text) == Answer(calls=[PARIS, ("get_time", {})])
        assert read(form("hermes", streams=True), text) == Answer(calls=[PARIS, ("get_time", {})])


def test_tags_within_texts_are_texts() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {"zone": "<tool_call>"}}</tool_call>'
    assert read(form("hermes"), text) == Answer(calls=[("get_time", {"zone": "<tool_call>"})])


@alike("streams", [True, False], first=1)
@alike(
    "zone",
    ["<tool_call>{}</tool_call>", "</tool_call>", 'a "</tool_call>\n<tool_call>\\', "</tool_call>" * 3],
    first=1,
)
def test_the_last_tag_within_a_string_is_text(zone: str, streams: bool) -> None:
    how, call = form("hermes", streams=streams), ("get_time", {"zone": zone})
    for written in (
        json.dumps({"name": "get_time", "arguments": {"zone": zone}}),
        json.dumps({"arguments": {"zone": zone}, "name": "get_time"}),
    ):
        text = f"<tool_call>\n{written}\n</tool_call>"
        assert read(how, f"{text}\n{ONE} Done.") == Answer(" Done.", calls=[call, PARIS])
        assert read(form("hermes", "think", opened=True, streams=streams), f"So {text}") == Answer("", "So", [call])
        assert read(form("hermes", special=special("hermes"), streams=streams), text) == Answer(calls=[call])


def test_the_last_tag_ends_a_call_whose_string_has_no_end() -> None:
    begun = '{"name": "get_time", "arguments": {"zone": "CET'
    text = f"<tool_call>{begun}</tool_call>\n{ONE} Done."
    assert read(form("hermes"), text) == Answer(f"<tool_call>{begun}</tool_call> Done.", calls=[PARIS])
    broken = [("get_time", '{"zone": "CET')]
    assert read(form("hermes", streams=True), text) == Answer(" Done.", calls=[PARIS], broken=broken)
    only = f"<tool_call>{begun}</tool_call> Done."
    assert read(form("hermes"), only) == Answer(only)
    assert read(form("hermes", streams=True), only) == Answer(" Done.", broken=broken)


@pytest.mark.parametrize("streams", [False, True])
def test_python_and_a_bracket_too_many_are_read(streams: bool) -> None:
    how = form("hermes", streams=streams)
    for written in (
        "{'name': 'get_weather', 'arguments': {'city': 'Paris, \"FR\"', 'days': 3}}",
        '{"name": "get_weather", "arguments": {\'city\': \'Paris, "FR"\', "days": 3}}',
        '{"name": "get_weather", "arguments": {"city": "Paris, \\"FR\\"", "days": 3}}}',
        '{"arguments": {"city": "Paris, \\"FR\\"", "days": 3}, "name": "get_weather"}\n}',
    ):
        assert read(how, f"<tool_call>\n{written}\n</tool_call>") == Answer(calls=[PARIS]), written


def test_white_space_behind_a_call_is_given_with_text_alone() -> None:
    assert read(form("hermes"), ONE + "\n\n") == Answer(calls=[PARIS])
    assert read(form("hermes"), ONE + "\n\nDone.") == Answer("\n\nDone.", calls=[PARIS])


def test_an_answer_may_be_held_to_one_call() -> None:
    assert read(form("hermes", single=True), f"First:\n{ONE}\n{OTHER} done") == Answer("First:", calls=[PARIS])


@pytest.mark.parametrize(
    "text",
    [
        "Call <tool_call>f</tool_call> like this.",
        'a <tool_call>{"name": "get_weather", "arguments": {"city"',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        "</tool_call> <tool_call",
    ],
)
def test_malformed_calls_come_back_as_text(text: str) -> None:
    assert read(form("hermes"), text) == Answer(text)


def test_a_malformed_call_does_not_spoil_the_next() -> None:
    assert read(form("hermes"), f"<tool_call>?</tool_call>\n{ONE}") == Answer("<tool_call>?</tool_call>", calls=[PARIS])
