"""Reasoning is what stands between its tags at the beginning of an answer."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read


@pytest.mark.parametrize(
    ("name", "begin", "end"), [("think", "<think>", "</think>"), ("mistral", "[THINK]", "[/THINK]")]
)
def test_reasoning_comes_before_the_answer(name: str, begin: str, end: str) -> None:
    text = f"{begin}\nTwo and two\nmake four.\n{end}\n\nIt is 4.\n"
    assert read(form(None, name), text) == Answer("It is 4.\n", "Two and two\nmake four.")
    assert read(form(None, name, special={begin: 1, end: 2}), text).content == "It is 4.\n"


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    opened = form(None, "think", opened=True)
    assert read(opened, "I see.\n</think>\n\nYes.") == Answer("Yes.", "I see.")
    assert read(opened, "<think>\nI see.</think>Yes.") == Answer("Yes.", "I see.")
    assert read(opened, "It goes on and <on") == Answer("", "It goes on and <on")


@pytest.mark.parametrize("text", ["", "\n No reasoning.", "The tag <think> opens it, </think> ends it.", "<thin"])
def test_other_texts_are_unchanged(text: str) -> None:
    assert read(form(None, "think"), text) == Answer(text)


def test_reasoning_is_shown_as_it_arrives() -> None:
    parser = form(None, "think").parser()
    shown = [[getattr(part, "text", "") for part in parser.push(piece)] for piece in ("<think>", "a", "b", "</think>")]
    assert shown == [[], ["a"], ["b"], []]


CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def test_calls_end_an_answer_whose_reasoning_does_not_end() -> None:
    thinking = form("hermes", "think", opened=True)
    assert read(thinking, f"The time.\n{CALL}") == Answer("", "The time.", [("get_time", {})])
    assert read(thinking, f"Both.\n{CALL}\n{CALL}\n") == Answer("", "Both.", [("get_time", {})] * 2)
    assert read(form("hermes", "think"), f"<think>{CALL}") == Answer(calls=[("get_time", {})])


@pytest.mark.parametrize("rest", [" would do.", "\n</think>\n\nNo.", f"\n{CALL} twice?</think>No."])
def test_calls_that_do_not_end_the_answer_are_reasoning(rest: str) -> None:
    thought, _, answer = f"So {CALL}{rest}".partition("</think>")
    found = read(form("hermes", "think", opened=True), f"So {CALL}{rest}")
    assert found == Answer(answer.strip(), thought.rstrip() if answer else thought)


def test_calls_follow_the_reasoning() -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    text = f"<think>\n<tool_call>maybe</tool_call>?\n</think>\n\n{call}"
    assert read(form("hermes", "think"), text) == Answer("", "<tool_call>maybe</tool_call>?", [("get_time", {})])
