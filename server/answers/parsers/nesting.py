"""The end of a JSON value in a text that arrives in pieces."""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r'["\\{}\[\]]')


class Nesting:
    """Follows brackets and strings of a JSON value over pieces of it."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def end_in(self, text: str) -> int | None:
        """Return where in the next piece the value ends; None if it goes on."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while found := _STRUCTURE.search(text, at):
            letter, at = found[0], found.end()
            if letter == "\\":
                self._escaped = self._quoted and at == len(text)
                at += self._quoted
            elif letter == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if letter in "{[" else -1
                if self._depth == 0:
                    return at
        return None
