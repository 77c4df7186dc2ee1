"""Values are checked against the keywords that schemas of functions use."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.server.answers.parsers.schema_check import fits, unchecked_keyword

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "friends": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, [1, 1.0, -3], [1.5, "1", True, None, []]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 2}, [0, 1.9], [-1, 2, False]),
        ({"type": ["string", "null"], "maxLength": 2}, ["", "ab", None], ["abc", 1]),
        ({"type": "boolean"}, [True, False], [0, 1, "true"]),
        ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", True, 2]),
        ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, 1]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, "a"]]),
        (
            PERSON,
            [{"name": "a", "friends": [{"name": "b"}]}],
            [{}, {"name": "a", "friends": [{}]}, {"name": "a", "x": 1}],
        ),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
        ({"oneOf": [{"minimum": 0}, {"maximum": 5}]}, [-1, 6], [3]),
        ({"allOf": [{"minimum": 0}, {"maximum": 5}]}, [3], [-1, 6]),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}}, ["x"], [1]),
        ({"additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "1"}]),
        ({}, [1, "a", None, {}], []),
    ],
)
def test_values_that_fit_and_values_that_do_not(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not fits(value, schema)] == []
    assert [value for value in bad if fits(value, schema)] == []


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        *((schema, 1) for schema in ({"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "elsewhere"}, {"minimum": "a"}, 5)),
        *((schema, 1) for schema in ({"type": 5}, {"type": "x"}, {"enum": 5}, {"allOf": 1}, {"type": [[]]})),
        *((schema, {"a": 1}) for schema in ({"properties": 5}, {"required": 5}, {"anyOf": [{"$ref": "#"}] * 9})),
    ],
)
def test_nothing_fits_a_schema_that_is_none(schema: Any, value: Any) -> None:
    assert not fits(value, schema)


def test_a_value_that_takes_too_many_steps_does_not_fit() -> None:
    assert fits([1] * 100, {"items": {}})
    assert not fits([1] * 100_000, {"items": {}})


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (PERSON, None),
        ({"properties": {"not": {"type": "string", "title": "if"}}, "default": {"not": 1}}, None),
        ({"properties": {"a": {"items": {"anyOf": [{"pattern": "x"}]}}}}, "pattern"),
        ({"$defs": {"a": {"not": {}}}}, "not"),
    ],
)
def test_keywords_that_are_not_checked_are_named(schema: Any, keyword: str | None) -> None:
    assert unchecked_keyword(schema) == keyword
