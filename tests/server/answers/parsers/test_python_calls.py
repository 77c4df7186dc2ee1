"""Calls written as Python are read, and nothing is evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.server.answers.parsers.python_calls import PythonCall, python_calls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1", -1),
        ("2.5e3", 2500.0),
        ("True", True),
        ("None", None),
        ("'it\\'s \\n \"x\"'", 'it\'s \n "x"'),
        ("[1, ('a',), {}]", [1, ["a"], {}]),
        ("{'a': {'b': [True]},}", {"a": {"b": [True]}}),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert python_calls(f"f({text}, x={text})") == [PythonCall("f", [value], {"x": value})]


@pytest.mark.parametrize("text", ["a.b(); c()", "[a.b(), c(),]", "a.b()\nprint(c())", "  [ a.b ( ) , c ( ) ] "])
def test_several_calls(text: str) -> None:
    assert python_calls(text) == [PythonCall("a.b", [], {}), PythonCall("c", [], {})]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "f", "f(", "f()x", "f(x)", "f(g())", "f(1 + 1)", "f(x=)", "[f()", "f(), g()]", "f('a)", "1"),
        *("f(*a)", "f({1: 2})", "f(" + "[" * 100 + "]" * 100 + ")", "print(" * 100_000, "f(" + "9" * 5000 + ")"),
        "f(a b)",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    assert python_calls(text) is None


def test_escapes_of_json_are_read() -> None:
    (call,) = python_calls(r'f(a="\u00e9\ud83d\ude00\b\/", b="\x41")') or ()
    assert call.named == {"a": "é😀\b/", "b": "A"}
