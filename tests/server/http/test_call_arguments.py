"""The calls of earlier answers: their arguments as templates expect them, within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.server.http.call_arguments import check_arguments, with_object
from bigmodel.server.http.json_bounds import JSONBoundsError


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_become_the_object_that_templates_expect(given: Any, seen: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    assert with_object(call) == {**call, "function": {"name": "f", "arguments": seen}}
    assert call["function"]["arguments"] == given  # type: ignore[index]


@pytest.mark.parametrize("call", [{}, {"function": None}, {"function": {"name": "f"}}])
def test_calls_without_arguments_are_unchanged(call: dict[str, Any]) -> None:
    assert with_object(call) == call


@pytest.mark.parametrize("text", ["[" * 30_000, "{" * 30_000, "," * 60_000])
def test_arguments_of_megabytes_are_not_parsed(text: str) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    check_arguments([call])
    with pytest.raises(JSONBoundsError, match="too many values"):
        check_arguments([call, call])
