"""What the grammar of a family's calls lets a model write is what the parser of that family reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

import torch

from bigmodel.server.answers.parsers.call_grammars import CALL_GRAMMARS
from bigmodel.server.answers.parsers.formats import TOOL_FORMATS
from bigmodel.server.answers.parsers.held_answers import held_answer
from bigmodel.server.answers.parsers.schema_check import fits
from bigmodel.server.engine.sampling.expressions import json_text
from bigmodel.server.engine.sampling.grammar import Grammar, GrammarError
from tests.server.answers.parsers.reading import SCHEMAS, Answer, form, read, read_pieces
from tests.server.engine.sampling.test_grammar import compiler
from tests.server.engine.sampling.test_tool_schema import accepts, after, may_end
from tests.server.grammars import LocalState
from tests.server.tiny import tiny_tokenizer

HELD = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
PARIS = ("get_weather", {"city": "Paris", "days": 3})
TIME = ("get_time", {})
WRITTEN = {
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "function-gemma": "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
    "<start_function_call>call:get_time{}<end_function_call>",
    "gemma": '```tool_code\nget_weather(city="Paris", days=3)\nget_time()\n```',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:get_time{}<tool_call|>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
    "glm4": 'get_weather\n{"city": "Paris", "days": 3}<|assistant|>get_time\n{}',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris", "days": 3}<|call|><|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{}',
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.get_time:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "llama4": '<|python_start|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
    '{"name": "get_time", "parameters": {}}<|python_end|>',
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
    '{"name": "get_time", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
    '{"name": "get_time", "arguments": {}}]',
    "qwen-xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
}
ALL = pytest.mark.parametrize("tools", sorted(TOOL_FORMATS))


def grammar_of(tools: str, reasoning: str | None = None, *, single: bool = False, opened: bool = False) -> Grammar:
    return compiler().compile(held_answer(form(tools, reasoning, single=single, opened=opened), json_text(HELD)))


def begins(grammar: Grammar, text: str) -> bool:
    return after(grammar, text) is not None


def test_every_format_of_calls_has_a_grammar() -> None:
    assert CALL_GRAMMARS.keys() == TOOL_FORMATS.keys() == WRITTEN.keys()


@pytest.mark.slow
@ALL
def test_an_answer_is_calls_or_the_text_that_is_held(tools: str) -> None:
    grammar, single = grammar_of(tools), grammar_of(tools, single=True)
    final = "<|channel|>final<|message|>" if tools == "harmony" else ""
    calls = WRITTEN[tools]
    assert may_end(grammar, calls)
    assert read(form(tools), calls) == Answer(calls=[PARIS, TIME])
    assert may_end(grammar, final + '{"ok": true}')
    assert not begins(single, calls)
    for wrong in ("I look it up.", final + '{"ok": 1}', calls.replace("get_time", "get_tide")):
        assert not begins(grammar, wrong)
    assert not begins(grammar, calls.replace("3", "three"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tools", sorted(TOOL_FORMATS.keys() - {"glm", "qwen-xml", "minimax", "deepseek-dsml"})
)  # whose free text never ends
@pytest.mark.parametrize("single", [False, True])
def test_whatever_the_grammar_lets_a_model_write_is_read_as_calls_that_fit(tools: str, single: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    called = 0
    for _ in range(4):
        text = random_answer(grammar_of(tools, single=single), generator)
        if text is None:
            continue
        found = read_pieces(form(tools, single=single), [text])
        if found.calls:
            called += 1
            assert not found.content.strip(), text
            assert all(fits(arguments, SCHEMAS[name]) for name, arguments in found.calls), text
        else:
            assert fits(json.loads(found.content), HELD), text
    assert called


def random_answer(grammar: Grammar, generator: torch.Generator) -> str | None:
    """What a model writes that knows nothing but likes to end; None if it is long."""
    state, tokens = LocalState(grammar), []
    liked = [tiny_tokenizer().encode(letter)[0] for letter in '"}>)`]']
    while not state.complete:
        if len(tokens) > 600:
            return None
        scores = torch.rand(261, generator=generator)
        scores[liked] += 0.4
        scores[260] += 1
        scores[128:256] -= 1  # bytes of longer characters
        state.mask(scores)
        token = int(scores.argmax())
        if token == 260:
            break
        state.advance(token)
        tokens.append(token)
    text: str = tiny_tokenizer().decode(tokens)
    return text


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "opened"), [("", True), ("<think>", False), (None, False)])
def test_reasoning_before_the_text_is_free(begin: str | None, opened: bool) -> None:
    grammar = grammar_of("hermes", "think", opened=opened)
    thought = "" if begin is None else begin + "So <i>what</ </think>\n\n"
    for text in ('{"ok": true}', WRITTEN["hermes"]):
        assert may_end(grammar, thought + text)
    assert not begins(grammar, thought + "Well")
    assert accepts(grammar, thought + '{"ok": true}')


def test_analysis_comes_before_the_final_message() -> None:
    analysis = "<|channel|>analysis<|message|>Which <city>?<|end|><|start|>assistant"
    grammar = grammar_of("harmony", "harmony")
    assert may_end(grammar, analysis + '<|channel|>final <|constrain|>json<|message|>{"ok": true}')
    assert may_end(grammar, analysis + analysis + WRITTEN["harmony"])
    assert not begins(grammar, analysis + "<|channel|>final<|message|>Rain")


@pytest.mark.slow
def test_arguments_between_tags_have_the_types_of_their_schemas() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", 3]},
            "size": {"$ref": "#/$defs/size"},
            "note": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "short": {"type": "string", "maxLength": 2},
            "list": {"type": "array", "items": {"$ref": "#/$defs/size"}},
        },
        "required": ["kind", "size"],
        "$defs": {"size": {"type": "number"}},
    }
    fit = [
        {"kind": "a", "size": "1.5"},
        {"kind": "3", "size": "2", "note": "null"},
        {"kind": "3", "size": "2", "note": "4", "short": "xy", "list": "[1, 2.5]"},
    ]
    others = [
        {"kind": "b", "size": "1"},
        {"kind": "a"},
        {"kind": "a", "size": "big"},
        {"kind": "a", "size": "1", "short": "xyz"},
        {"kind": "a", "size": "1", "list": '["x"]'},
    ]
    for tools, write in (("qwen-xml", qwen_xml_call), ("glm", glm_call)):
        grammar = compiler().compile(CALL_GRAMMARS[tools]({"f": schema}, True))
        assert [values for values in fit if not accepts(grammar, write(values))] == []
        assert [values for values in others if begins(grammar, write(values))] == []


def qwen_xml_call(values: dict[str, str]) -> str:
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>"


def glm_call(values: dict[str, str]) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>f\n{pairs}</tool_call>"


def refers(count: int) -> dict[str, Any]:
    """Many arguments that refer to as many definitions, and those to others."""
    names = [f"d{number}" for number in range(count)]
    parts = {name: {"type": "array", "items": {"$ref": f"#/$defs/{name}"}} for name in names}
    return {"type": "object", "$defs": parts, "properties": {name: {"$ref": f"#/$defs/{name}"} for name in names}}


@pytest.mark.parametrize(
    ("tools", "schema"),
    [
        *((tools, refers(1000)) for tools in sorted(TOOL_FORMATS)),
        *(
            (tools, {"properties": {f"p{number}": {} for number in range(3000)}})
            for tools in ("function-gemma", "gemma")
        ),
    ],
)
def test_a_schema_whose_grammar_would_be_far_larger_is_refused(tools: str, schema: dict[str, Any]) -> None:
    calls = CALL_GRAMMARS[tools]({"f": schema}, False)
    with pytest.raises(GrammarError, match=r"more than \d+ (values|parts)"):
        compiler().kept(calls)
