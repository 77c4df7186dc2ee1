"""Qwen's and Hermes' calls: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one after another."""

from __future__ import annotations

from collections.abc import Callable

from bigmodel.server.answers.parsers.call_text import ends_object, read_called
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Reading, TextReader

BEGIN, END = "<tool_call>", "</tool_call>"


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    while True:
        begin = yield from reader.until((BEGIN,), reader.content)
        if not begin.marker:
            return
        before = begin.text + (yield from reader.space())
        called = yield from read_called(reader, tools, (END,))
        text, end = yield from reader.collect(END)
        if called is None:
            reader.calls_or_text(tools.read(text), before + text + end.text)
        else:
            called.close(text, fits=ends_object(text), before=before, end=end.text)


def read_tagged(reader: TextReader, calls_in: Callable[[str], list[ToolCall] | None]) -> Reading[None]:
    """Read content, and calls between tags, which `calls_in` finds in the text between two of them."""
    while True:
        begin = yield from reader.until((BEGIN,), reader.content)
        if not begin.marker:
            return
        text, end = yield from reader.collect(END)
        reader.calls_or_text(calls_in(text), begin.text + text + end.text)
