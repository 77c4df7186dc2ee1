"""A marker of the end within a value belongs to the value, and what is held back stays cheap."""

from __future__ import annotations

import re

import pytest

from bigmodel.server.answers.parsers.call_end import CodeStrings, QuotedValues, TaggedValues, Values
from bigmodel.server.answers.parsers.parts import Content
from tests.server.answers.parsers.reading import Answer, form, read_pieces


def tagged() -> TaggedValues:
    return TaggedValues(re.compile("<v>"), re.compile(r"</v>(?=<v>|\Z)"))


@pytest.mark.parametrize(
    ("values", "pieces"),
    [
        (tagged(), [("a<v>b", True), ("c", True), ("</v> <v>", True), ("</v>", False), ("</v>", False)]),
        (tagged(), [("<v>a</v><v>b</v>", False), ("<v><v>", True)]),
        (QuotedValues("|"), [("|a|b|", True), ("c", True), ("|", False), ("||", False)]),
        (CodeStrings(), [("f(x=[1], y='", True), ("]'", False), (")\ng(\"it's", True), ('\\"', True), ('")', False)]),
    ],
)
def test_whether_a_value_is_open(values: Values, pieces: list[tuple[str, bool]]) -> None:
    assert [values.open_behind(piece) for piece, _ in pieces] == [is_open for _, is_open in pieces]


def test_after_one_value_without_an_end_calls_end_at_their_first_marker() -> None:
    """Each call might have to be looked for up to the end of the answer: work would grow with its square."""
    broken = "<tool_call><function=get_time><parameter=zone>x</tool_call> "
    good = "<tool_call><function=get_time><parameter=zone>{}</parameter></function></tool_call>"
    assert read_pieces(form("qwen-xml"), [good.format("</tool_call>")]).calls == [
        ("get_time", {"zone": "</tool_call>"})
    ]
    held = f"{broken}? </tool_call> {good.format('</tool_call>')}"
    assert read_pieces(form("qwen-xml"), [held]) == Answer(held)
    assert read_pieces(form("qwen-xml"), [broken * 2000 + good.format("CET")]).calls == [("get_time", {"zone": "CET"})]


def test_a_value_without_an_end_holds_back_text_only_until_the_next_call() -> None:
    parser = form("qwen-xml").parser()
    broken = "<tool_call><function=get_time><parameter=zone>x</tool_call>"
    assert parser.push(broken) == []
    assert parser.push("<tool_call>?</tool_call>") == [Content(f"{broken}<tool_call>?</tool_call>")]
