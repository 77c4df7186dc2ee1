"""The end of a JSON value in a text that arrives in pieces."""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r"""["'\\{}\[\]]""")
_BEFORE_STRING = tuple("[{(,:=")


class Nesting:
    """Follows brackets and strings of a JSON value over pieces of it; also of Python's, whose quotes may be single."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._last = ""

    @property
    def in_string(self) -> bool:
        """Whether the pieces end within a string."""
        return bool(self._quote)

    def end_in(self, text: str) -> int | None:
        """Return where in the next piece the value ends; None if it goes on."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while found := _STRUCTURE.search(text, at):
            letter, begin, at = found[0], found.start(), found.end()
            if letter == "\\":
                self._escaped = bool(self._quote) and at == len(text)
                at += bool(self._quote)
            elif self._quote:
                if letter == self._quote:
                    self._quote = ""
            elif letter == '"' or (letter == "'" and self._before(text, begin).endswith(_BEFORE_STRING)):
                self._quote = letter
            elif letter != "'":
                self._depth += 1 if letter in "{[" else -1
                if self._depth == 0:
                    return at
        self._last = self._before(text, len(text))
        return None

    def _before(self, text: str, end: int) -> str:
        """The last character before `end` that is no white space."""
        while end and text[end - 1].isspace():
            end -= 1
        return text[end - 1] if end else self._last
