"""Calls as GLM 4.5 writes them."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read, special

CALL = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris "12"</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>"""
PARIS = ("get_weather", {"city": 'Paris "12"', "days": 3})


def test_calls_with_arguments_and_without() -> None:
    assert read(form("glm"), CALL) == Answer(calls=[PARIS])
    several = f"I look.\n{CALL}\n<tool_call>get_time\n</tool_call>"
    assert read(form("glm"), several) == Answer("I look.", calls=[PARIS, ("get_time", {})])


@pytest.mark.parametrize(
    "city",
    [
        *(
            "</tool_call>",
            "a</tool_call></arg_value> b",
            "<tool_call>get_time\n</tool_call>",
            "<arg_key>zone</arg_key>",
        ),
        "</tool_call>" * 3 + "\n",
    ],
)
def test_tags_within_a_value_are_text(city: str) -> None:
    text = CALL.replace('Paris "12"', city)
    wanted = [("get_weather", {"city": city, "days": 3}), PARIS]
    assert read(form("glm"), f"{text}\n{CALL}\nDone.") == Answer("\nDone.", calls=wanted)


def test_a_value_without_an_end_ends_with_the_call() -> None:
    text = CALL.replace("</arg_value>", "")
    assert read(form("glm"), text + CALL + "Done.") == Answer(text + "Done.", calls=[PARIS])
    assert read(form("glm"), text + "Done.") == Answer(text + "Done.")


def test_reasoning_comes_first() -> None:
    text = f"\n<think>Which city?</think>\nParis.\n{CALL}"
    assert read(form("glm", "think"), text) == Answer("Paris.", "Which city?", [PARIS])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>unknown\n</tool_call>",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n</tool_call>",
        "<tool_call>get_weather\n<arg_key>city<arg_value>Paris</arg_value></tool_call>",
        "<tool_call>get_weather\n<arg_key>city</arg_key>x<arg_value>Paris</arg_value></tool_call>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par",
    ],
)
def test_malformed_calls_come_back_as_text(text: str) -> None:
    assert read(form("glm"), text) == Answer(text)


def test_tags_may_be_special_tokens() -> None:
    assert read(form("glm", special=special("glm")), CALL) == Answer(calls=[PARIS])
