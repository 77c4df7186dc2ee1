"""The end of a call whose values are no JSON: the marker of the end counts only where no value is open."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from bigmodel.server.answers.parsers.nesting import Nesting
from bigmodel.server.answers.parsers.reader import Found, Reading, TextReader


class Values(Protocol):
    """Follows the values of a call over pieces of its text, each of which ends before a marker of the end."""

    def open_behind(self, text: str) -> bool:
        """Whether a value is open behind the next piece."""


class TaggedValues:
    """Values between tags.

    Args:
        begin: The tag before a value.
        end: The tag behind a value, with what follows it there: the same tag may stand in the value.
    """

    def __init__(self, begin: re.Pattern[str], end: re.Pattern[str]) -> None:
        self._tags = begin, end
        self._open = False

    def open_behind(self, text: str) -> bool:
        at = 0
        while found := self._tags[self._open].search(text, at):
            self._open, at = not self._open, found.end()
        return self._open


class QuotedValues:
    """Texts between two of the same mark."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._open = False

    def open_behind(self, text: str) -> bool:
        self._open ^= text.count(self._quote) % 2 == 1
        return self._open


class CodeStrings:
    """Strings of Python or JSON."""

    def __init__(self) -> None:
        self._nesting = Nesting()

    def open_behind(self, text: str) -> bool:
        while (end := self._nesting.end_in(text)) is not None:
            text = text[end:]
        return self._nesting.in_string


def collect_call(
    reader: TextReader, end: str, values: Values, fits: Callable[[str], bool], again: str = ""
) -> Reading[tuple[str, Found]]:
    """Return the text of a call and the marker that ends it.

    A marker within a value belongs to the value, if the call comes to an end behind it and is one. If not, the text is
    no call or a malformed one, and ends at the first marker; and no later call is looked at so far, as each might have
    to be to the end of the answer.

    Args:
        reader: The reader, behind the marker that begins the call.
        end: The marker.
        values: Follows the values of the call.
        fits: Whether a text is a call.
        again: The marker that begins the next call: where it follows at once, the value has no end.
    """
    first, found = yield from reader.collect(end)
    open_value = values.open_behind(first)
    if not (open_value and found.marker and reader.values_may_have_ends):
        return first, found
    pieces, last = [first], found
    while open_value and last.marker:
        written = last.text
        piece, last = yield from reader.collect(end)
        pieces += [written, piece]
        if again and piece.lstrip().startswith(again):
            break
        open_value = values.open_behind(written + piece)
    text = "".join(pieces)
    if not open_value and fits(text):
        return text, last
    reader.values_may_have_ends &= open_value and len(pieces) == 3 and bool(last.marker)
    reader.give_back(text[len(first + found.text) :] + last.text)
    return first, found
