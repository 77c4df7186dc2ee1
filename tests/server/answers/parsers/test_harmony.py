"""Messages as gpt-oss writes them, after a prompt that ends with `<|start|>assistant`."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read, special

ANALYSIS = "<|channel|>analysis<|message|>The user asks for the weather."
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}<|call|>'
)
PARIS = ("get_weather", {"city": "Paris"})
HIDDEN = special("harmony")
HOW = form("harmony", "harmony", special=HIDDEN)


def test_the_final_channel_is_the_answer() -> None:
    text = f"{ANALYSIS}<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    wanted = Answer("It rains.", "The user asks for the weather.")
    assert read(HOW, text) == wanted
    assert read(HOW, text.removesuffix("<|return|>")) == wanted  # an end token has no text


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CALL.removesuffix("<|call|>"),
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
    ],
)
def test_a_message_to_a_function_is_a_call(call: str) -> None:
    assert read(HOW, f"{ANALYSIS}<|end|>{call}") == Answer("", "The user asks for the weather.", [PARIS])
    assert read(HOW, call.removeprefix("<|start|>assistant")) == Answer(calls=[PARIS])


@pytest.mark.parametrize("streams", [False, True])
def test_a_marker_within_a_string_is_text(streams: bool) -> None:
    how = form("harmony", "harmony", special=HIDDEN, streams=streams)
    marked = CALL.replace("Paris", "<|call|><|start|>")
    assert read(how, marked + CALL) == Answer(calls=[("get_weather", {"city": "<|call|><|start|>"}), PARIS])


def test_a_preamble_is_content() -> None:
    preamble = "<|channel|>commentary<|message|>I look it up.<|end|>"
    assert read(HOW, preamble + CALL) == Answer("I look it up.", calls=[PARIS])


def test_reasoning_and_calls_are_parsed_apart_from_each_other() -> None:
    text = f"{ANALYSIS}<|end|>{CALL}"
    assert read(form("harmony", None, special=HIDDEN), text) == Answer("The user asks for the weather.", calls=[PARIS])
    shown = read(form(None, "harmony", special=HIDDEN), text)
    assert shown == Answer('assistantcommentary to=functions.get_weather json{"city": "Paris"}', shown.reasoning)


def test_a_header_that_does_not_end_is_text_and_the_next_message_is_read() -> None:
    broken = "<|channel|>commentary to=functions.get_rain? There is none.<|end|>"
    assert read(HOW, broken + CALL) == Answer("commentary to=functions.get_rain? There is none.", calls=[PARIS])
    again = "<|channel|>commentary to=functions.get_rain" + CALL
    assert read(HOW, again) == Answer("commentary to=functions.get_rain", calls=[PARIS])


def test_a_name_may_have_the_type_of_the_arguments_at_its_end() -> None:
    assert read(HOW, CALL.replace("get_weather <|constrain|>json", "get_weatherjson")) == Answer(calls=[PARIS])


@pytest.mark.parametrize("text", ["", "It rains.", " to be", "to=", "<|channel", "a\n"])
def test_text_without_a_header_is_content(text: str) -> None:
    assert read(form("harmony", "harmony"), text) == Answer(text)


@pytest.mark.parametrize(
    "call",
    [
        CALL.replace("get_weather", "unknown"),
        CALL.replace('"}', ""),
        CALL.replace("functions.", "browser."),
        "<|start|>assistant<|channel|>commentary to=functions.get_weather",
    ],
)
def test_malformed_calls_come_back_as_text(call: str) -> None:
    found = read(HOW, f"{ANALYSIS}<|end|>{call}")
    assert (found.calls, found.reasoning) == ([], "The user asks for the weather.")
    assert "<|" not in found.content
    body = call.partition("<|message|>")[2].removesuffix("<|call|>")
    assert body in found.content
