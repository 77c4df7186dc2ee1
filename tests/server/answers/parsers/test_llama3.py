"""Calls as Llama 3.1, 3.2 and 3.3 write them."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read, special

CALL = '{"name": "get_weather", "parameters": {"city": "Paris {FR}"}}'
PARIS = ("get_weather", {"city": "Paris {FR}"})
TAG = "<|python_tag|>"


@pytest.mark.parametrize("text", [CALL, f"{TAG}{CALL}", f"\n\n{CALL}", CALL.replace("parameters", "arguments")])
def test_the_answer_is_a_call(text: str) -> None:
    assert read(form("llama3", special=special("llama3")), text) == Answer(calls=[PARIS])


def test_several_calls_stand_one_after_another() -> None:
    assert read(form("llama3"), f"{CALL}; {CALL}\n{CALL}") == Answer(calls=[PARIS] * 3)


@pytest.mark.parametrize(
    "text",
    [
        "[get_weather(city='Paris {FR}')]",
        '\n\n[ get_weather(city="Paris {FR}") ]',
        f'{TAG}get_weather.call(city="Paris {{FR}}")',
        f"{TAG}get_weather(city='Paris {{FR}}')",
        '<function=get_weather>{"city": "Paris {FR}"}</function>',
        '<function=get_weather>\n{"city": "Paris {FR}"}',
        "[get_weather({'city': 'Paris {FR}'})]",
    ],
)
def test_the_other_forms_of_the_documentation(text: str) -> None:
    assert read(form("llama3", special=special("llama3")), text) == Answer(calls=[PARIS])
    assert read(form("llama3"), text + "\n") == Answer(calls=[PARIS])


def test_brackets_in_single_quotes_do_not_end_a_list() -> None:
    assert read(form("llama3"), "[get_time(zone='[it] \\'s] ')] Done.") == Answer(
        " Done.", calls=[("get_time", {"zone": "[it] 's] "})]
    )


@pytest.mark.parametrize("streams", [False, True])
def test_the_tag_of_the_end_within_a_string_is_text(streams: bool) -> None:
    text = '<function=get_time>{"zone": "</function>"}</function> Done.'
    wanted = Answer(" Done.", calls=[("get_time", {"zone": "</function>"})])
    assert read(form("llama3", streams=streams), text) == wanted


def test_text_is_not_held_back_where_no_call_begins() -> None:
    for text in ("The", "[a", "[1, ", "<function="):
        parser = form("llama3").parser()
        shown = parser.push(text + " b c")
        assert "".join(getattr(part, "text", "") for part in shown).startswith(text)


def test_text_after_a_call_is_content() -> None:
    assert read(form("llama3"), f"{CALL}; That is all.") == Answer("; That is all.", calls=[PARIS])


@pytest.mark.parametrize(
    "text",
    [
        "It rains.",
        '{"answer": 42} is the answer',
        f"The call is {CALL}",
        CALL[:-1],
        '{"name": "unknown", "parameters": {}}',
        f'{TAG}print("a")',
        f"{TAG}get_time(zone=now())",
        "[unknown()]",
        "[get_time(zone=now())] is it",
        '<function=unknown>{"city": "Paris"}</function>',
        '<function=get_weather>{"city": "Paris"} in France</function>',
        "<function=get_weather>Paris</function>",
        "Write <function=get_weather",
    ],
)
def test_other_texts_are_content(text: str) -> None:
    assert read(form("llama3"), text) == Answer(text)


def test_the_tag_is_not_shown_where_it_is_a_special_token() -> None:
    assert read(form("llama3", special=special("llama3")), f'{TAG}print("a")') == Answer('print("a")')
