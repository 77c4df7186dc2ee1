"""Calls as DeepSeek V3.2 and MiniMax M2 write them."""

from __future__ import annotations

import pytest

from bigmodel.server.answers.parsers.invoke_xml import DEEPSEEK, MINIMAX, InvokeMarks
from tests.examples import alike
from tests.server.answers.parsers.reading import Answer, form, read, special

FAMILIES = pytest.mark.parametrize(("tools", "marks"), [("deepseek-dsml", DEEPSEEK), ("minimax", MINIMAX)])
ONE_FAMILY = alike(("tools", "marks"), [("minimax", MINIMAX), ("deepseek-dsml", DEEPSEEK)], first=1)
PARIS = ("get_weather", {"city": 'Paris\n "12"', "days": 3})
TIME = ("get_time", {})


def argument(marks: InvokeMarks, name: str, value: str, string: bool) -> str:
    kind = f' string="{str(string).lower()}"' if marks.typed else ""
    return f'{marks.argument}{name}"{kind}>{value}{marks.argument_end}\n'


def call(marks: InvokeMarks, city: str = 'Paris\n "12"') -> str:
    arguments = argument(marks, "city", city, True) + argument(marks, "days", "3", False)
    return f'{marks.call}get_weather">\n{arguments}{marks.call_end}\n'


def block(marks: InvokeMarks, *calls: str, number: int = 0) -> str:
    begin, end = marks.blocks[number]
    return f"{begin}\n{''.join(calls)}{end}"


@ONE_FAMILY
@pytest.mark.parametrize("marked", [False, True])
def test_one_call_and_several(tools: str, marks: InvokeMarks, marked: bool) -> None:
    how = form(tools, special=special(tools) if marked else {})
    assert read(how, f"I look.\n\n{block(marks, call(marks))}") == Answer("I look.", calls=[PARIS])
    both = block(marks, call(marks), f'{marks.call}get_time">\n{marks.call_end}\n')
    assert read(how, both) == Answer(calls=[PARIS, TIME])
    assert read(how, block(marks, call(marks)).removesuffix(marks.blocks[0][1])) == Answer(calls=[PARIS])


def test_the_block_of_the_next_version() -> None:
    assert read(form("deepseek-dsml"), block(DEEPSEEK, call(DEEPSEEK), number=1)) == Answer(calls=[PARIS])


@ONE_FAMILY
def test_tags_within_a_value_are_text(tools: str, marks: InvokeMarks) -> None:
    for city in (marks.call_end, f"{marks.argument_end} a", marks.blocks[0][1], f"{marks.call_end}\n" * 2):
        wanted = [("get_weather", {"city": city, "days": 3}), PARIS]
        assert read(form(tools), block(marks, call(marks, city), call(marks)) + "Done.") == Answer(
            "Done.", calls=wanted
        )


def test_values_are_texts_where_the_tag_says_so() -> None:
    for string, value in ((True, "3"), (False, 3)):
        text = f'{DEEPSEEK.call}get_time">{argument(DEEPSEEK, "other", "3", string)}{DEEPSEEK.call_end}'
        assert read(form("deepseek-dsml"), block(DEEPSEEK, text)) == Answer(calls=[("get_time", {"other": value})])
    text = f'{DEEPSEEK.call}get_weather">{argument(DEEPSEEK, "days", "3", True)}{DEEPSEEK.call_end}'
    assert read(form("deepseek-dsml"), block(DEEPSEEK, text)) == Answer(calls=[("get_weather", {"days": 3})])


@FAMILIES
def test_reasoning_comes_first(tools: str, marks: InvokeMarks) -> None:
    text = f"Which city?\n</think>\n\n{block(marks, call(marks))}"
    assert read(form(tools, "think", opened=True), text) == Answer("", "Which city?", [PARIS])


@FAMILIES
def test_malformed_calls_come_back_as_text(tools: str, marks: InvokeMarks) -> None:
    wrong = f'{marks.call}unknown">\n{marks.call_end}\n'
    for text in (
        *(block(marks), block(marks, wrong), marks.blocks[0][0], marks.blocks[0][1], block(marks, call(marks))[:90]),
        block(marks, call(marks).replace(marks.argument_end, "")),
        block(marks, f'{marks.call}get_time">now{marks.call_end}'),
        block(marks, f"{marks.call}get_time{marks.call_end}"),
    ):
        assert read(form(tools), text) == Answer(text), text
    assert read(form(tools), block(marks, call(marks), wrong)) == Answer(f"\n{wrong.rstrip()}", calls=[PARIS])
