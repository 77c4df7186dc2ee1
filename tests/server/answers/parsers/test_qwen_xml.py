"""Calls as Qwen 3 Coder and Qwen 3.5 write them."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read, special

CALL = """<tool_call>
<function=get_weather>
<parameter=city>
Paris
 > "12"
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
PARIS = ("get_weather", {"city": 'Paris\n > "12"', "days": 3})


def test_calls_with_arguments_and_without() -> None:
    assert read(form("qwen-xml"), CALL) == Answer(calls=[PARIS])
    several = f"I look.\n\n{CALL}\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
    assert read(form("qwen-xml"), several) == Answer("I look.", calls=[PARIS, ("get_time", {})])


@pytest.mark.parametrize(
    "city",
    [
        *("</tool_call>", "</parameter> a </tool_call>\nb", "</function>", "<tool_call>\n</tool_call>", "<function=f>"),
        "</tool_call>" * 3,
    ],
)
@pytest.mark.parametrize("tagged", [True, False])
def test_tags_within_a_value_are_text(city: str, tagged: bool) -> None:
    call = CALL if tagged else CALL.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    text = call.replace('Paris\n > "12"', city)
    wanted = [("get_weather", {"city": city, "days": 3}), PARIS]
    assert read(form("qwen-xml"), f"{text}{call}\nDone.") == Answer("\nDone.", calls=wanted)


def test_a_value_without_an_end_ends_with_the_call() -> None:
    text = CALL.replace("</parameter>", "")
    assert read(form("qwen-xml"), text + CALL + "Done.") == Answer(text + "Done.", calls=[PARIS])
    assert read(form("qwen-xml"), text + "Done.") == Answer(text + "Done.")


def test_the_first_tag_may_be_missing() -> None:
    naked = CALL.removeprefix("<tool_call>\n")
    for text in (naked, naked.removesuffix("\n</tool_call>"), naked + "\n" + naked):
        found = read(form("qwen-xml"), f"I look.\n\n{text}\nDone.")
        assert found == Answer("I look.\nDone.", calls=[PARIS] * text.count("</function>"))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=unknown></function></tool_call>",
        "<tool_call><function=get_time</function></tool_call>",
        "<tool_call><function=get_time>now</function></tool_call>",
        "<tool_call><function=get_time><parameter=zone>CET</function></tool_call>",
        "<tool_call><function=get_time><parameter=zone</parameter></function></tool_call>",
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        "<function=unknown>\n</function>",
        "<function=get_time>\n<parameter=zone>\nCET\n</function>",
        "Write <function=get_time> first.",
    ],
)
def test_malformed_calls_come_back_as_text(text: str) -> None:
    assert read(form("qwen-xml"), text) == Answer(text)


def test_tags_may_be_special_tokens() -> None:
    assert read(form("qwen-xml", special=special("qwen-xml")), CALL) == Answer(calls=[PARIS])
