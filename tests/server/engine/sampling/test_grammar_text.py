"""All that an answer may be is one grammar, with one rule for what means the same."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

import xgrammar

from bigmodel.server.engine.sampling.expressions import (
    Expression,
    characters,
    choice,
    free_text,
    json_text,
    literal,
    optional,
    repeated,
    sequence,
    space,
)
from bigmodel.server.engine.sampling.grammar_text import grammar_text
from bigmodel.server.engine.sampling.tool_schema import calls_schema
from tests.server.engine.sampling.test_grammar import compiler
from tests.server.engine.sampling.test_tool_schema import accepts, may_end

INTEGER = json_text({"type": "integer"})


@pytest.mark.parametrize(
    ("expression", "fit", "others"),
    [
        (literal('a"\\\n'), ['a"\\\n'], ["a", ""]),
        (sequence(literal("a"), space(), literal("b")), ["ab", "a b", "a \n\tb"], ["a" + " " * 5 + "b", "a"]),
        (choice([literal("a"), INTEGER]), ["a", "12", "-3"], ["b", "a1"]),
        (sequence(optional(literal("a")), literal("b")), ["b", "ab"], ["aab", "a"]),
        (sequence(repeated(literal("a"), literal(",")), literal(".")), ["a.", "a,a,a."], [".", "a,.", "aa."]),
        (sequence(characters(1, 2, "<"), literal("<")), ["x<", "ö\n<"], ["<", "xxx<"]),
        (choice([json_text({"const": '"x ::= root{0, 4}'}), literal("-")]), ['"\\"x ::= root{0, 4}"'], ["x"]),
    ],
)
def test_a_grammar_has_its_expressions_texts_alone(expression: Expression, fit: list[str], others: list[str]) -> None:
    grammar = compiler().compile(sequence(expression, literal("!")))
    assert [text for text in fit if not accepts(grammar, text + "!")] == []
    assert [text for text in others if accepts(grammar, text + "!")] == []


@pytest.mark.slow
@pytest.mark.parametrize("excluded", [("<a>",), ("<ab>", "</a>"), ("<b", "<ab")])
def test_free_text_is_all_text_without_what_is_excluded(excluded: tuple[str, ...]) -> None:
    grammar = compiler().compile(sequence(free_text(*excluded), literal("!")))
    for letters in product("<ab/>", repeat=4):
        text = "".join(letters)
        assert may_end(grammar, text + "!") == (not any(each in text for each in excluded)), text


def test_what_cannot_be_excluded_is_said() -> None:
    with pytest.raises(ValueError, match="one character"):
        grammar_text(xgrammar, free_text("```"))


def functions(number: int) -> dict[str, Any]:
    member = {"type": "object", "properties": {"x": {"type": "string"}, "y": {"$ref": "#/$defs/list"}}}
    lists = {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}
    return {
        f"f{index}": {"type": "object", "properties": {"a": {"type": "string"}, "o": member}, "$defs": lists}
        for index in range(number)
    }


def test_functions_that_take_the_same_have_the_same_rules() -> None:
    one, many = (len(grammar_text(xgrammar, calls_of(number)).splitlines()) for number in (1, 40))
    assert many <= one + 41  # the choice, and a rule for each name


def test_schemas_that_differ_have_the_rules_of_strings_and_white_space_in_common() -> None:
    schemas = [json_text({"properties": {f"a{index}": {"type": "string"}}}) for index in range(20)]
    rules = [line.split(" ::= ")[0] for line in grammar_text(xgrammar, choice(schemas)).splitlines()]
    assert sum(name.endswith("_basic_string") for name in rules) == 1
    assert len([name for name in rules if "whitespace" in name]) == 0


def calls_of(number: int) -> Expression:
    called = [sequence(literal(name), json_text(schema)) for name, schema in functions(number).items()]
    return choice(called)


@pytest.mark.slow
def test_the_kept_grammar_of_many_functions_is_small() -> None:
    schemas = {
        f"f{index}": {"properties": {f"a{index}": {"type": "string"}, f"b{index}": {"type": "integer"}}}
        for index in range(80)
    }
    before = compiler().kept_bytes
    grammar = compiler().compile(json_text(calls_schema(schemas, single=False)))
    assert compiler().kept_bytes - before < 2 << 20  # 98 MB as xgrammar serialises it
    call = [{"name": "f79", "arguments": {"a79": "x", "b79": 3}}]
    assert accepts(grammar, json.dumps(call))
    assert not accepts(grammar, json.dumps(call).replace("b79", "b78"))
