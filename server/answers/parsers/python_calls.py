"""Calls written as Python: `f(a="x", b=[1, 2])`. Nothing is evaluated.

Python's own parser is not used: a deeply nested text, which a client can have a model write, may overflow its stack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_DEPTH = 32
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>[A-Za-z_][\w.]*)"""
    r"""|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<sign>[\[\](){},:=;]))""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class _NoCallsError(ValueError):
    """A text is something else."""


@dataclass(frozen=True)
class PythonCall:
    """A call: its positional and its named arguments, values of JSON."""

    name: str
    positional: list[Any]
    named: dict[str, Any]


def python_calls(text: str) -> list[PythonCall] | None:
    """Return the calls in a text: lines or a list of them, each perhaps printed; None if anything else is in it."""
    try:
        return _Calls(text).all()
    except (ValueError, RecursionError):  # also of numbers with thousands of digits
        return None


class _Calls:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        text = text.strip()
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise _NoCallsError
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        self._tokens.append(("end", ""))
        self._at = 0

    def all(self) -> list[PythonCall]:
        listed = self._skips("[")
        calls: list[PythonCall] = []
        while not calls or not self._ends(listed):
            calls.append(self._call())
            while self._skips("," if listed else ";"):
                pass
        return calls

    def _ends(self, listed: bool) -> bool:
        if listed and not self._skips("]"):
            return False
        if self._tokens[self._at][0] == "end":
            return True
        if listed:
            raise _NoCallsError
        return False

    def _call(self) -> PythonCall:
        name = self._next("name")
        self._expect("(")
        if name == "print":
            call = self._call()
            self._expect(")")
            return call
        positional: list[Any] = []
        named: dict[str, Any] = {}
        while not self._skips(")"):
            if self._tokens[self._at][0] == "name" and self._tokens[self._at + 1] == ("sign", "="):
                key = self._next("name")
                self._expect("=")
                named[key] = self._value(0)
            else:
                positional.append(self._value(0))
            self._comma(")")
        return PythonCall(name, positional, named)

    def _value(self, depth: int) -> Any:
        kind, text = self._tokens[self._at]
        self._at += 1
        if depth > _DEPTH or kind == "end":
            raise _NoCallsError
        if kind == "number":
            return int(text) if text.lstrip("-").isdecimal() else float(text)
        if kind == "text":
            return _whole(_ESCAPE.sub(_unescaped, text[1:-1]))
        if kind == "name" and text in _CONSTANTS:
            return _CONSTANTS[text]
        if text in ("[", "("):
            return self._list("]" if text == "[" else ")", depth)
        if text == "{":
            return self._object(depth)
        raise _NoCallsError

    def _list(self, closing: str, depth: int) -> list[Any]:
        values = []
        while not self._skips(closing):
            values.append(self._value(depth + 1))
            self._comma(closing)
        return values

    def _object(self, depth: int) -> dict[str, Any]:
        members = {}
        while not self._skips("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise _NoCallsError
            self._expect(":")
            members[key] = self._value(depth + 1)
            self._comma("}")
        return members

    def _comma(self, closing: str) -> None:
        if not self._skips(",") and self._tokens[self._at] != ("sign", closing):
            raise _NoCallsError

    def _skips(self, sign: str) -> bool:
        found = self._tokens[self._at] == ("sign", sign)
        self._at += found
        return found

    def _expect(self, sign: str) -> None:
        if not self._skips(sign):
            raise _NoCallsError

    def _next(self, kind: str) -> str:
        found, text = self._tokens[self._at]
        if found != kind:
            raise _NoCallsError
        self._at += 1
        return text


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    return chr(int(code, 16)) if code else _ESCAPED.get(found[3], found[3])


def _whole(text: str) -> str:
    """Text whose pairs of surrogates, as JSON escapes them, are characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
