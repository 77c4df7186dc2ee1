"""Arguments come in pieces as they are written, and together they are the whole ones, byte for byte."""

from __future__ import annotations

import pytest

from bigmodel.server.answers.parsers.parts import AnswerPart, Arguments, CallBegun, CallEnded, Content, ToolCall
from tests.examples import alike
from tests.server.answers.parsers.reading import Answer, form, read, read_pieces
from tests.server.answers.parsers.test_call_grammars import PARIS, TIME, WRITTEN

NAMED = '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]get_time[ARGS]{}'
LISTED = '[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "get_time", "arguments": {}}]'
FORMS = {
    **{tools: (form(tools), form(tools, streams=True), text) for tools, text in WRITTEN.items()},
    "mistral, named": (form("mistral"), form("mistral", streams=True), NAMED),
    "required": (form("hermes", forced=True), form("hermes", forced=True, streams=True), LISTED),
}
IN_PIECES = sorted(FORMS.keys() - {"deepseek-dsml", "function-gemma", "gemma", "gemma4", "glm", "minimax", "qwen-xml"})
BEGUN = {
    "llama3": '{"name": "get_weather", "parameters": ',
    "mistral": "[TOOL_CALLS]get_weather[ARGS]",
    "glm4": "get_weather\n",
    "hermes": '<tool_call>{"name": "get_weather", "arguments": ',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>",
    "llama4": '<|python_start|>{"name": "get_weather", "parameters": ',
    "harmony": "<|channel|>commentary to=functions.get_weather<|message|>",
}


def parts_of(how: object, pieces: list[str]) -> list[AnswerPart]:
    parser = how.parser()  # type: ignore[attr-defined]
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


@pytest.mark.parametrize("name", FORMS)
def test_pieces_are_the_whole_arguments_at_every_split(name: str) -> None:
    whole, streamed, text = FORMS[name]
    wanted = read_pieces(whole, [text])
    assert (wanted.calls, wanted.content.strip()) == ([PARIS, TIME], "")
    splits = [[text], [*text], *([text[:cut], text[cut:]] for cut in range(1, len(text)))]
    for pieces in splits:
        found = read_pieces(streamed, pieces)
        assert (found, found.written) == (wanted, wanted.written)


@pytest.mark.parametrize("name", IN_PIECES)
def test_arguments_come_as_they_are_written(name: str) -> None:
    _, streamed, text = FORMS[name]
    parts = parts_of(streamed, [*text])
    assert not any(isinstance(part, ToolCall) for part in parts)
    assert len([part for part in parts if isinstance(part, Arguments)]) > 20
    assert parts[0] == CallBegun("get_weather")


def test_arguments_are_as_the_model_wrote_them() -> None:
    arguments = '{"city":"Paris\\u00e9",\n "days": 3.0}'
    for streams in (False, True):
        found = read_pieces(
            form("hermes", streams=streams), [f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}']
        )
        assert found.written == [arguments]


@pytest.mark.parametrize("tools", BEGUN)
def test_a_call_that_breaks_off_ends_incomplete_and_is_text_as_a_whole(tools: str) -> None:
    cut, wrong = BEGUN[tools] + '{"city": "Par', BEGUN[tools] + '{"city": oops}'
    assert read(form(tools, streams=True), cut) == Answer(broken=[("get_weather", '{"city": "Par')])
    found = read(form(tools, streams=True), wrong)
    assert (found.calls, found.broken) == ([], [("get_weather", '{"city": ')])
    assert found.content.startswith("oops}")
    for text in (cut, wrong):
        assert read(form(tools), text).calls == []


@pytest.mark.parametrize("tools", BEGUN)
def test_a_call_that_cannot_be_made_does_not_begin(tools: str) -> None:
    unknown = BEGUN[tools].replace("get_weather", "unknown") + "{}"
    for text in (unknown, BEGUN[tools] + "[1]", BEGUN[tools] + '"a"'):
        assert read(form(tools, streams=True), text) == read(form(tools), text)


@pytest.mark.slow
@alike("tools", [*BEGUN], first=3)
def test_a_head_that_breaks_off_or_is_malformed_is_text(tools: str) -> None:
    head = BEGUN[tools]
    texts = [head[:cut] for cut in range(len(head))]
    texts += [head.replace("get_weather", wrong) + '{"city": "Paris"}' for wrong in ("", "get weather", "get_weather2")]
    for text in texts:
        found = read(form(tools, streams=True), text)
        assert (found.calls, found.broken) == ([], [])
        assert found == read(form(tools), text)
        assert found.content.strip() == text.strip()


def test_strict_arguments_come_whole_and_only_where_they_fit() -> None:
    how = form("hermes", streams=True, strict=frozenset(["get_weather"]))
    begin, end = BEGUN["hermes"], "}</tool_call>"
    assert parts_of(how, [*f'{begin}{{"city": "Rome"}}{end}']) == [ToolCall("get_weather", '{"city": "Rome"}')]
    assert read(how, f'{begin}{{"city": 5}}{end}') == Answer(f'{begin}{{"city": 5}}{end}')


def test_an_answer_of_one_call_ends_with_it() -> None:
    text = WRITTEN["hermes"] + " more"
    parts = parts_of(form("hermes", streams=True, single=True), [*text])
    assert parts[-1] == CallEnded(True)
    assert not any(isinstance(part, Content) for part in parts)
    assert sum(isinstance(part, CallBegun) for part in parts) == 1
