"""Calls between markers, each a head and JSON, within markers around all of them: DeepSeek's and Kimi's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bigmodel.server.answers.parsers.reader import Reading, TextReader


@dataclass(frozen=True)
class SectionMarks:
    """The markers: around the calls, before and behind one, and between its head and the arguments."""

    calls: str
    calls_end: str
    call: str
    separator: str
    call_end: str

    @property
    def all(self) -> tuple[str, ...]:
        """All of them."""
        return (self.calls, self.calls_end, self.call, self.separator, self.call_end)


ReadCall = Callable[[str, str], Reading[bool]]
"""Reads what follows a head, given that and the text before; returns whether it is a call, or has begun as one."""


def read_sections(reader: TextReader, marks: SectionMarks, read_call: ReadCall) -> Reading[None]:
    """Read content and calls."""
    while True:
        begin = yield from reader.until((marks.calls,), reader.content)
        if not begin.marker:
            return
        yield from _section(reader, marks, read_call, begin.text)


def _section(reader: TextReader, marks: SectionMarks, read_call: ReadCall, before: str) -> Reading[None]:
    """Read the calls of one section. Its first marker, ``before``, and its last one are given back if it has none."""
    called = False
    while True:
        text, found = yield from reader.collect(marks.call, marks.calls_end)
        if text or not found.marker:
            reader.content(before + text)
            before = ""
        if found.marker != marks.call:
            if not called:
                reader.content(before + found.text)
            return
        head, middle = yield from reader.collect(marks.separator, marks.call_end)
        before += found.text + head + middle.text
        if middle.marker == marks.separator:
            called |= yield from read_call(head.strip(), before)
        else:
            reader.content(before)
        before = ""
