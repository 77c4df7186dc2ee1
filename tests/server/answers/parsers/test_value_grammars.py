"""Values between tags have the types of their schemas."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.value_grammars import Root, tagged_value, with_root
from bigmodel.server.engine.sampling.expressions import free_text

ROOT: dict[str, Any] = {"$defs": {"n": {"type": "integer"}, "s": {"type": "string"}}}


@pytest.mark.parametrize(
    ("part", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, '"3"', '"3"'),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, '"3"', 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "true"}, "true", "true"),
        ({"$ref": "#/$defs/s"}, "5", "5"),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "string", "maxLength": 1}, "12", "12"),
        ({}, "12", 12),
        ({}, "x", "x"),
        (None, "None", None),
    ],
)
def test_a_text_is_read_as_its_schema_says(part: Any, text: str, value: Any) -> None:
    schema = {**ROOT, "properties": {} if part is None else {"a": part}}
    found = Tools({"f": schema}).argument("f", "a", text)
    assert (found, type(found)) == (value, type(value))


def test_a_part_that_refers_to_its_root_takes_it_along() -> None:
    schema = {**ROOT, "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "null"}}}
    assert with_root(schema["properties"]["b"], ("properties", "b"), Root(schema)) == {"type": "null"}
    moved = with_root(schema["properties"]["a"], ("properties", "a"), Root(schema))
    assert moved["$ref"] == "#/$defs/0/properties/a"
    assert moved["$defs"]["0"]["properties"]["a"] == {"$ref": "#/$defs/0/$defs/n"}


def test_alternatives_that_lead_back_or_to_the_same_are_followed_once() -> None:
    again = {"$ref": "#/$defs/a"}
    schema = {"$defs": {"a": {"anyOf": [again, again, {"type": "integer"}, {"$ref": "#/$defs/a"}]}}}
    assert tagged_value(again, Root(schema), ("</v>",)) == {"schema": {"type": "integer"}}
    assert Tools({"f": {**schema, "properties": {"x": again}}}).argument("f", "x", "three") == "three"


def test_alternatives_that_lead_nowhere_are_free_text() -> None:
    nothing = {"$ref": "#/$defs/a"}
    assert tagged_value(nothing, Root({"$defs": {"a": nothing}}), ("</v>",)) == free_text("</v>")
