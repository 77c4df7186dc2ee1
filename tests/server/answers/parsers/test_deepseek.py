"""Calls as DeepSeek V3, R1 and V3.1 write them."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read, special

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
V31 = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
WRONG = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{oops\n```<｜tool▁call▁end｜>"
PARIS = ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("call", [V3, V31])
def test_one_call_and_several(call: str) -> None:
    how = form("deepseek", special=special("deepseek"))
    assert read(how, f"{BEGIN}{call}{END}") == Answer(calls=[PARIS])
    assert read(how, f"I look.{BEGIN}{call}\n{call}{END}") == Answer("I look.", calls=[PARIS] * 2)
    assert read(how, f"{BEGIN}{call.removesuffix('<｜tool▁call▁end｜>')}") == Answer(calls=[PARIS])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("call", [V3, V31])
def test_a_marker_within_a_string_is_text(call: str, streams: bool) -> None:
    marked = call.replace("Paris", f"<｜tool▁call▁end｜>{END}")
    wanted = [("get_weather", {"city": f"<｜tool▁call▁end｜>{END}"}), PARIS]
    assert read(form("deepseek", streams=streams), f"{BEGIN}{marked}{call}{END}") == Answer(calls=wanted)


def test_reasoning_comes_first() -> None:
    text = f"Which city?\n</think>\n\n{BEGIN}{V3}{END}"
    assert read(form("deepseek", "think", opened=True), text) == Answer("", "Which city?", [PARIS])


def test_a_malformed_call_comes_back_as_text_beside_others() -> None:
    assert read(form("deepseek"), f"{BEGIN}{V3}\n{WRONG}{END}") == Answer("\n" + WRONG, calls=[PARIS])
    assert read(form("deepseek"), f"{BEGIN}{WRONG}{V3}{END}") == Answer(BEGIN + WRONG, calls=[PARIS])


@pytest.mark.parametrize(
    "text",
    [
        *(BEGIN, f"{BEGIN}{END}", f"a {BEGIN}b", f"{BEGIN}{WRONG}{END}", f"{BEGIN}{V3[:30]}", f"a {END}"),
        f"{BEGIN}<｜tool▁call▁begin｜>get_time<｜tool▁call▁end｜>{END}",
    ],
)
def test_malformed_calls_come_back_as_text(text: str) -> None:
    assert read(form("deepseek"), text) == Answer(text)
