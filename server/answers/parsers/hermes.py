"""Qwen's and Hermes' calls: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one after another.

The last tag counts outside of the strings of the JSON. Models also write the first tag twice, or where the last one
should be, or leave the last one out between two calls.
"""

from __future__ import annotations

from collections.abc import Callable

from bigmodel.server.answers.parsers.call_end import Values, collect_call
from bigmodel.server.answers.parsers.call_text import ends_object, read_called
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Found, Reading, TextReader

BEGIN, END = "<tool_call>", "</tool_call>"


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    while True:
        begin = yield from reader.until((BEGIN,), reader.content)
        if not begin.marker:
            return
        before = begin.text + (yield from reader.space())
        while again := (yield from reader.starts(BEGIN)):
            before += again + (yield from reader.space())
        called = yield from read_called(reader, tools, (END,))
        text, end = yield from (reader.collect_object(END) if called is None else reader.collect(END))
        if called is None:
            text, end = _up_to_begin(reader, text, end, lambda each: tools.read(each) is not None)
            reader.calls_or_text(tools.read(text), before + text + end.text)
        else:
            text, end = _up_to_begin(reader, text, end, ends_object)
            called.close(text, fits=ends_object(text), before=before, end=end.text)


def _up_to_begin(reader: TextReader, text: str, end: Found, fits: Callable[[str], bool]) -> tuple[str, Found]:
    """Return the text and the tag that ends it; if a first tag is in it and it is a call up to there, end it there."""
    first, begin, rest = text.partition(BEGIN)
    if not begin or not fits(first):
        return text, end
    reader.give_back(begin + rest + end.text)
    return first, Found("", "")


def read_tagged(
    reader: TextReader, values: Callable[[], Values], calls_in: Callable[[str], list[ToolCall] | None]
) -> Reading[None]:
    """Read content, and calls between tags, which `calls_in` finds in the text between two of them.

    ``values`` makes what follows the values of a call.
    """
    while True:
        begin = yield from reader.until((BEGIN,), reader.content)
        if not begin.marker:
            return
        text, end = yield from collect_call(reader, END, values(), lambda each: calls_in(each) is not None, BEGIN)
        reader.calls_or_text(calls_in(text), begin.text + text + end.text)
