"""Answers that have to call functions: reasoning is free before them, and what the grammar lets through is read."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

from bigmodel.server.answers.parsers.formats import REASONING_TAGS, TOOL_FORMATS
from bigmodel.server.answers.parsers.held_answers import held_answer, required_calls
from bigmodel.server.engine.sampling.expressions import json_text
from bigmodel.server.engine.sampling.grammar import Grammar
from tests.server.answers.parsers.reading import Answer, form, read
from tests.server.answers.parsers.test_call_grammars import HELD, PARIS, TIME, WRITTEN, begins
from tests.server.engine.sampling.test_grammar import compiler
from tests.server.engine.sampling.test_tool_schema import may_end

LISTED = '[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "get_time", "arguments": {}}]'
LISTING = pytest.mark.parametrize("tools", [None, *sorted(TOOL_FORMATS.keys() - {"harmony"})])
TAGGED = pytest.mark.parametrize("reasoning", sorted(REASONING_TAGS))


def required(tools: str | None, reasoning: str | None = None, **more: Any) -> tuple[Any, Grammar]:
    """How such an answer is read, and its grammar."""
    how = form(tools, reasoning, forced=True, **more)
    return how, compiler().compile(required_calls(how))


@LISTING
def test_required_calls_are_a_list_in_json(tools: str | None) -> None:
    how, grammar = required(tools)
    assert may_end(grammar, LISTED)
    assert read(how, LISTED) == Answer(calls=[PARIS, TIME])
    assert not begins(grammar, "Well")
    assert not begins(grammar, "<think>")
    assert not begins(grammar, LISTED.replace("3", '"three"'))


@TAGGED
def test_reasoning_comes_before_required_calls(reasoning: str) -> None:
    begin, end = REASONING_TAGS[reasoning]
    how, grammar = required("hermes", reasoning)
    text = f"{begin}Paris [or Rome]?{end}\n\n{LISTED}"
    assert may_end(grammar, text)
    assert read(how, text) == Answer("", "Paris [or Rome]?", [PARIS, TIME])
    assert may_end(grammar, LISTED)
    assert not begins(grammar, f"{begin}Rome{end}I call")


@pytest.mark.slow
@TAGGED
def test_a_prompt_that_opens_the_reasoning_has_it_before_the_calls(reasoning: str) -> None:
    _, end = REASONING_TAGS[reasoning]
    how, grammar = required("hermes", reasoning, opened=True)
    text = f"Paris?{end}{LISTED}"
    assert may_end(grammar, text)
    assert read(how, text) == Answer("", "Paris?", [PARIS, TIME])
    assert not may_end(grammar, LISTED)


@TAGGED
def test_a_prompt_that_closes_the_reasoning_has_none_before_the_answer(reasoning: str) -> None:
    begin, _ = REASONING_TAGS[reasoning]
    _, grammar = required("hermes", reasoning, closed=True)
    assert may_end(grammar, LISTED)
    assert not begins(grammar, begin)
    held = compiler().compile(held_answer(form("hermes", reasoning, closed=True), json_text(HELD)))
    assert may_end(held, '{"ok": true}')
    assert may_end(held, WRITTEN["hermes"])
    assert not begins(held, begin)


@pytest.mark.slow
def test_harmony_calls_in_its_own_messages_after_the_analysis() -> None:
    analysis = "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant"
    how, grammar = required("harmony", "harmony")
    for thought, reasoning in (("", ""), (analysis, "Which city?")):
        assert may_end(grammar, thought + WRITTEN["harmony"])
        assert read(how, thought + WRITTEN["harmony"]) == Answer("", reasoning, [PARIS, TIME])
    assert not begins(grammar, LISTED)
    assert not begins(grammar, analysis + "<|channel|>final")


@pytest.mark.parametrize("tools", ["hermes", "harmony"])
def test_a_single_call_ends_the_answer(tools: str) -> None:
    _, grammar = required(tools, single=True)
    calls = WRITTEN[tools] if tools == "harmony" else LISTED
    assert not may_end(grammar, calls)
