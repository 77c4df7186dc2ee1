"""Calls as FunctionGemma and Gemma 4 write them."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read, special

PARIS = ("get_weather", {"city": "Paris", "days": 3})
TIME = ("get_time", {})
BEGIN, END = "<start_function_call>", "<end_function_call>"
CALL = f"{BEGIN}call:get_weather{{city:<escape>Paris<escape>,days:3}}{END}"
MARKED = special("function-gemma")


@pytest.mark.parametrize("hidden", [{}, MARKED])
def test_calls_with_arguments_and_without(hidden: dict[str, int]) -> None:
    how = form("function-gemma", special=hidden)
    assert read(how, CALL) == Answer(calls=[PARIS])
    assert read(how, f"I look. {CALL}{BEGIN}call:get_time{{}}{END}") == Answer("I look.", calls=[PARIS, TIME])
    assert read(how, CALL.removesuffix(END)) == Answer(calls=[PARIS])


def test_a_marker_within_a_text_is_text() -> None:
    for city in (END, f"{BEGIN}{END} {END}", f"{END}{BEGIN}"):
        text = CALL.replace("Paris", city)
        wanted = [("get_weather", {"city": city, "days": 3}), PARIS]
        assert read(form("function-gemma"), f"{text}{CALL} Done.") == Answer(" Done.", calls=wanted)
    broken = CALL.replace("Paris<escape>", "Paris")
    assert read(form("function-gemma"), f"{broken} Done.") == Answer(f"{broken} Done.")


def test_the_marker_of_a_result_behind_calls_is_not_shown() -> None:
    assert read(form("function-gemma"), f"{CALL}<start_function_response>") == Answer(calls=[PARIS])
    assert read(form("function-gemma"), "<start_function_response>") == Answer("<start_function_response>")


def test_gemma_4_has_markers_of_its_own() -> None:
    call = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
    how = form("gemma4", "gemma4", special=special("gemma4") | {"<|channel>": 90, "<channel|>": 91})
    assert read(how, f"<|channel>thought\nWhich city?\n<channel|>{call}") == Answer("", "Which city?", [PARIS])
    assert read(how, f"{call}<|tool_response>") == Answer(calls=[PARIS])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('<escape>a, {b} "c"\n<escape>', 'a, {b} "c"\n'),
        ('"a\\u00e9"', "aé"),
        ("Paris", "Paris"),
        ("-1.5", -1.5),
        ("true", True),
        ("null", None),
        ("[<escape>a<escape>, 2,[]]", ["a", 2, []]),
        ("{b:{<escape>c d<escape>:<escape><escape>}}", {"b": {"c d": ""}}),
    ],
)
def test_values(written: str, value: object) -> None:
    text = f"{BEGIN}call:get_time{{zone:{written}}}{END}"
    assert read(form("function-gemma"), text) == Answer(calls=[("get_time", {"zone": value})])


@pytest.mark.parametrize(
    "call",
    [
        *("", "get_time{}", "call:unknown{}", "call:get_time", "call:get_time{} now", "call:get_time{zone}"),
        *(
            "call:get_time{zone:}",
            "call:get_time{zone:<escape>CET}",
            "call:get_time{zone:[1}",
            "call:get_time{zone:1 {}",
        ),
        *("call:get_time{" + "a:{" * 100 + "}" * 101, 'call:get_time{zone:"\\x"}', "call:get_time{:1}"),
    ],
)
def test_malformed_calls_come_back_as_text(call: str) -> None:
    text = f"{BEGIN}{call}{END}"
    assert read(form("function-gemma"), text) == Answer(text)
