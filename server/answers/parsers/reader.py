"""A text that arrives in pieces, read by a parser that is written as if the whole text were there.

A parser is a generator: it yields where it has to wait for more text. What it finds does not depend on how the text is
cut into pieces: the beginning of a marker is held back until it is one or is none, and so is white space before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeAlias, TypeVar

from bigmodel.server.answers.parsers.nesting import Nesting
from bigmodel.server.answers.parsers.object_text import ObjectText
from bigmodel.server.answers.parsers.parts import (
    AnswerPart,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
    ToolCall,
)

_ANY = re.compile(".", re.DOTALL)

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""A part of a parser; it yields where it waits for more text."""

Sink: TypeAlias = Callable[[str], None]
"""Destination of text: the content, the reasoning, or a list."""

GAP = 32
"""Longest white space beside a marker that belongs to the marker, not to the text."""

HEAD = 1024
"""Most characters before the arguments of a call that are waited for, to send them as they come."""


class Found(NamedTuple):
    """A marker, empty at the end of the text, and the white space before it."""

    gap: str
    marker: str

    @property
    def text(self) -> str:
        """Both, as they were written."""
        return self.gap + self.marker


class TextReader:
    """The text that is not yet read, and the parts found so far.

    Args:
        hidden: Texts that are never shown: those of special tokens.
        single: Whether the answer ends with its first call; what follows is dropped.
        streams: Whether arguments are wanted in pieces, as they come.

    Attributes:
        values_may_have_ends: Whether a marker that ends calls is still looked for behind one that stands in a value.
    """

    def __init__(self, hidden: Iterable[str] = (), *, single: bool = False, streams: bool = False) -> None:
        self.streams = streams
        self.values_may_have_ends = True
        self._hidden = tuple(hidden)
        self._single = single
        self._text = ""
        self._ended = False
        self._closed = False
        self._space = ""
        self._called = False
        self._parts: list[AnswerPart] = []

    # --- what is found ----------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Give text of the answer, or text of a marker that turned out to be none.

        White space behind a call is given with the text that follows it, if any does.
        """
        if self._called and not text.strip():
            self._space += text
            return
        text, self._space, self._called = self._space + text, "", False
        self._show(Content, text)

    def reasoning(self, text: str) -> None:
        """Give text of the reasoning."""
        self._show(Reasoning, text)

    def calls(self, calls: Iterable[ToolCall]) -> None:
        """Give calls."""
        for call in calls:
            if not self._closed:
                self._parts.append(call)
                self._closed = self._single
                self._called = True

    def calls_or_text(self, calls: ToolCall | Iterable[ToolCall] | None, written: str) -> bool:
        """Give calls, or the text as it was written where there are none; return whether there are."""
        if calls is None:
            self.content(written)
        else:
            self.calls([calls] if isinstance(calls, ToolCall) else calls)
        return calls is not None

    def begin_call(self, name: str) -> None:
        """Begin a call whose arguments come in pieces."""
        if not self._closed:
            self._parts.append(CallBegun(name))

    def arguments(self, text: str) -> None:
        """Give a piece of the arguments of the call that has begun."""
        if text and not self._closed:
            last = self._parts[-1] if self._parts else None
            if isinstance(last, Arguments):
                self._parts[-1] = Arguments(last.text + text)
            else:
                self._parts.append(Arguments(text))

    def end_call(self, *, complete: bool) -> None:
        """End the call that has begun."""
        if not self._closed:
            self._parts.append(CallEnded(complete))
            self._closed = self._single
            self._called = True

    def _show(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        for marker in self._hidden:
            text = text.replace(marker, "")
        if not text or self._closed:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        else:
            self._parts.append(kind(text))

    def take(self) -> list[AnswerPart]:
        """Return the parts found since the last call."""
        parts, self._parts = self._parts, []
        return parts

    # --- what is read -----------------------------------------------------------------------------

    def add(self, text: str, *, last: bool = False) -> None:
        """Add a piece of text; none comes after the ``last`` one."""
        self._text += text
        self._ended = last

    def until(self, markers: tuple[str, ...], sink: Sink, *, whole: bool = False) -> Reading[Found]:
        """Pass the text before the first of `markers` to `sink`; return the marker. No marker contains another one.

        Other hidden texts, which may be parts of markers, are left out, unless the ``whole`` text is wanted.
        """
        others = () if whole else self._hidden
        known = (*markers, *(marker for marker in others if marker not in markers))
        while True:
            places = [(at, marker) for marker in known if (at := self._text.find(marker)) >= 0]
            begun = len(self._text) if self._ended else _without_beginning(self._text, known)
            if places and min(places)[0] <= begun:
                at, marker = min(places)
                wanted = marker in markers
                shown = _without_gap(self._text, at) if wanted else at
                gap = self._text[shown:at]
                sink(self._text[:shown])
                self._text = self._text[at + len(marker) :]
                if wanted:
                    return Found(gap, marker)
                continue
            all_of_it = self._ended or not known
            shown = len(self._text) if all_of_it else _without_gap(self._text, begun)
            sink(self._text[:shown])
            self._text = self._text[shown:]
            if self._ended:
                return Found("", "")
            yield

    def collect(self, *markers: str) -> Reading[tuple[str, Found]]:
        """Return the text before the first of `markers`, hidden texts in it included, and the marker."""
        pieces: list[str] = []
        found = yield from self.until(markers, pieces.append, whole=True)
        return "".join(pieces), found

    def space(self) -> Reading[str]:
        """Take the white space at the beginning of the text, `GAP` characters at most."""
        taken = ""
        while True:
            size = min(len(self._text) - len(self._text.lstrip()), GAP - len(taken))
            taken += self._text[:size]
            self._text = self._text[size:]
            if self._text or self._ended or len(taken) == GAP:
                return taken
            yield

    def starts(self, *options: str) -> Reading[str]:
        """Take the longest of `options` that the text begins with; return "" if it begins with none."""
        while not self._ended and any(o != self._text and o.startswith(self._text) for o in options):
            yield
        option = max((o for o in options if self._text.startswith(o)), key=len, default="")
        self._text = self._text[len(option) :]
        return option

    def value(self, opening: str, begun: str = "") -> Reading[str]:
        """Take the JSON value at the beginning of the text, which begins with one of the characters `opening`.

        Returns "" for other texts, and the whole rest where the value does not end. ``begun``: what of the value has
        been taken before.
        """
        while not self._text and not self._ended:
            yield
        if not begun and self._text[:1] not in tuple(opening):
            return ""
        pieces = [begun]
        nesting = Nesting()
        nesting.end_in(begun)
        while True:
            end = nesting.end_in(self._text)
            pieces.append(self._text[:end])
            self._text = "" if end is None else self._text[end:]
            if end is not None or self._ended:
                return "".join(pieces)
            yield

    def ahead(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Return what of the next `HEAD` characters matches, which is not taken, once it does; "" if nothing does."""
        while True:
            found = pattern.match(self._text, 0, HEAD)
            if found is not None or self._ended or len(self._text) >= HEAD:
                return "" if found is None else found[0]
            yield

    def take_next(self, size: int) -> str:
        """Take so many characters, which are there."""
        taken, self._text = self._text[:size], self._text[size:]
        return taken

    def give_back(self, text: str) -> None:
        """Put text before what is not yet read: it is read again."""
        self._text = text + self._text

    def object(self, text: ObjectText, sink: Sink, stop: tuple[str, ...] = ()) -> Reading[str]:
        """Take a JSON object up to its end, its first error, or one of the markers ``stop``; return what is taken.

        What ``text`` lets through of it goes to ``sink`` as it arrives. A marker within a string belongs to the string
        if the object ends behind it.
        """
        taken: list[str] = []
        while True:
            stops = [at for marker in stop if (at := self._text.find(marker)) >= 0]
            last = self._ended and not stops
            end = min(stops) if stops else len(self._text) if last else _without_beginning(self._text, stop)
            used, written = text.read(self._text[:end], last=last)
            sink(written)
            taken.append(self.take_next(used))
            if stops and text.in_string and (yield from self._completes(text)):
                stop = ()
                continue
            if stops and text.state == "open":
                used, written = text.read(self._text[: end - used], last=True)
                sink(written)
                taken.append(self.take_next(used))
            if text.state != "open" or stops or last:
                return "".join(taken)
            yield

    def _completes(self, text: ObjectText) -> Reading[bool]:
        """Return whether an object comes to its end in what is not yet read."""
        ahead, at = text.copy(), 0
        while True:
            used, _ = ahead.read(self._text[at:], last=self._ended)
            at += used
            if ahead.state != "open" or self._ended:
                return ahead.state == "complete"
            yield

    def collect_object(self, *markers: str) -> Reading[tuple[str, Found]]:
        """As :meth:`collect`, but markers within strings of the JSON object that the text begins with belong to it."""
        taken = ""
        if (yield from self.ahead(_ANY)) == "{":
            taken = yield from self.object(ObjectText(), lambda _: None, markers)
        text, found = yield from self.collect(*markers)
        return taken + text, found


def _without_beginning(text: str, markers: tuple[str, ...]) -> int:
    """Return where the longest end of `text` begins that may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return len(text) - length
    return len(text)


def _without_gap(text: str, end: int) -> int:
    """Return where the white space before `end` begins, `GAP` characters at most."""
    begin = end
    while begin > max(0, end - GAP) and text[begin - 1].isspace():
        begin -= 1
    return begin


class AnswerParser:
    """A parser that is fed with pieces of text, cut anywhere.

    Args:
        reader: The reader of `reading`.
        reading: The parser; the text that it leaves is content.
    """

    def __init__(self, reader: TextReader, reading: Reading[None]) -> None:
        self._reader = reader
        self._reading = _with_rest(reader, reading)
        next(self._reading, None)

    def push(self, text: str) -> list[AnswerPart]:
        """Add a piece of text; return what is certain by now."""
        if text:
            self._reader.add(text)
            next(self._reading, None)
        return self._reader.take()

    def finish(self) -> list[AnswerPart]:
        """Return the rest: no more text comes."""
        self._reader.add("", last=True)
        for _ in self._reading:
            pass
        return self._reader.take()


def _with_rest(reader: TextReader, reading: Reading[None]) -> Reading[None]:
    yield from reading
    yield from reader.until((), reader.content)
