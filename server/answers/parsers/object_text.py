"""The text of a JSON object that arrives in pieces, checked as it comes.

What is let through is always the beginning of an object that `json.loads` reads: a wrong character is the first thing
that is not. What models write and JSON forbids is rewritten: control characters within strings are escaped, and strings
in single quotes and the constants of Python become those of JSON. Nothing else changes.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Literal

DEPTH = 200
"""Most nested objects and lists."""

SCALAR = 4096
"""Most characters of a number. Python reads no integer of more than 4,300 digits."""

_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = {
    '"': re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+'),
    "'": re.compile(r"""[^'"\\\x00-\x1f\ud800-\udfff]+"""),
}
_SCALAR = re.compile(r'[^\s\[\]{},:"]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:0|[1-9][0-9]*)?(?:(?<=[0-9])\.[0-9]*)?(?:(?<=[0-9])[eE][-+]?[0-9]*)?")
_CONSTANTS = {**{each: each for each in ("true", "false", "null")}, "True": "true", "False": "false", "None": "null"}

State = Literal["open", "complete", "broken"]
_Next = Literal["value", "first value", "key", "first key", "colon", "comma"]


class ObjectText:
    """Follows one object; :meth:`read` is given its text from the opening bracket on."""

    def __init__(self) -> None:
        self.state: State = "open"
        self._stack: list[str] = []
        self._next: _Next = "value"
        self._in_key = False
        self._quote = ""
        self._written = ""

    @property
    def in_string(self) -> bool:
        """Whether what was read ends within a string."""
        return self.state == "open" and bool(self._quote)

    def copy(self) -> ObjectText:
        """Return another one that has read the same."""
        found = copy.copy(self)
        found._stack = self._stack.copy()
        return found

    def read(self, text: str, *, last: bool) -> tuple[int, str]:
        """Return how many characters are read, and what they are written as.

        The rest, the beginning of a number or of an escape, is to be given again with what follows. With the ``last``
        text all of it is read, unless the object is `broken`.
        """
        at, pieces = 0, []
        while at < len(text) and self.state == "open":
            end = self._step(text, at, last)
            if end == at:
                break
            pieces.append(self._written)
            at = end
        return at, "".join(pieces)

    def _step(self, text: str, at: int, last: bool) -> int:
        """Read one token, or a part of a string; return where it ends, or ``at`` where nothing is certain."""
        if self._quote:
            return self._in_string(text, at, last)
        space = _SPACE.match(text, at)
        if space:
            return self._write(text, at, space.end())
        letter = text[at]
        if not self._stack:
            return self._opens(letter, at) if letter == "{" else self._break(at)
        if letter in "{[":
            return self._opens(letter, at) if self._next in ("value", "first value") else self._break(at)
        if letter in "}]":
            return self._closes(letter, at)
        if letter in "\"'":
            return self._opens_string(letter, at)
        if letter in ",:":
            return self._between(letter, at)
        return self._scalar(text, at, last)

    def _write(self, text: str, at: int, end: int) -> int:
        self._written = text[at:end]
        return end

    def _break(self, at: int) -> int:
        self.state = "broken"
        return at

    def _opens(self, letter: str, at: int) -> int:
        if len(self._stack) == DEPTH:
            return self._break(at)
        self._stack.append(letter)
        self._next = "first key" if letter == "{" else "first value"
        return self._write(letter, 0, 1) + at

    def _closes(self, letter: str, at: int) -> int:
        empty = "first key" if letter == "}" else "first value"
        if self._stack[-1] != {"}": "{", "]": "["}[letter] or self._next not in ("comma", empty):
            return self._break(at)
        self._stack.pop()
        self._next = "comma"
        if not self._stack:
            self.state = "complete"
        return self._write(letter, 0, 1) + at

    def _opens_string(self, quote: str, at: int) -> int:
        if self._next in ("colon", "comma"):
            return self._break(at)
        self._in_key = self._next in ("key", "first key")
        self._quote = quote
        return self._write('"', 0, 1) + at

    def _between(self, letter: str, at: int) -> int:
        if self._next != {",": "comma", ":": "colon"}[letter]:
            return self._break(at)
        self._next = "key" if letter == "," and self._stack[-1] == "{" else "value"
        return self._write(letter, 0, 1) + at

    def _scalar(self, text: str, at: int, last: bool) -> int:
        """A number or a constant: certain once another character follows."""
        found = _SCALAR.match(text, at)
        if found is None or self._next not in ("value", "first value") or len(found[0]) > SCALAR:
            return self._break(at)
        scalar = found[0]
        if found.end() == len(text):
            if not last:
                return at
            if _NUMBER_BEGUN.fullmatch(scalar):
                return self._write(text, at, len(text))
            begun = next((known for each, known in _CONSTANTS.items() if each.startswith(scalar)), None)
            return self._break(at) if begun is None else self._write(begun, 0, len(scalar)) + at
        number = _NUMBER.fullmatch(scalar) and math.isfinite(float(scalar))
        if not number and scalar not in _CONSTANTS:
            return self._break(at)
        self._next = "comma"
        self._written = _CONSTANTS.get(scalar, scalar)
        return found.end()

    def _in_string(self, text: str, at: int, last: bool) -> int:
        plain = _PLAIN[self._quote].match(text, at)
        if plain:
            return self._write(text, at, plain.end())
        letter = text[at]
        if letter == self._quote:
            self._quote = ""
            self._next = "colon" if self._in_key else "comma"
            return self._write('"', 0, 1) + at
        if letter == '"' or text.startswith("\\'", at):
            self._written = '\\"' if letter == '"' else "'"
            return at + (1 if letter == '"' else 2)
        if letter != "\\":
            self._written = f"\\u{ord(letter):04x}" if letter not in _SHORT else _SHORT[letter]
            return at + 1
        escape = _ESCAPE.match(text, at)
        if escape:
            return self._write(text, at, escape.end())
        if _ESCAPE_BEGUN.fullmatch(text, at):
            return self._write(text, at, len(text)) if last else at
        return self._break(at)


_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
