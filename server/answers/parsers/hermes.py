"""Qwen's and Hermes' calls: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one after another."""

from __future__ import annotations

from collections.abc import Callable

from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import Reading, TextReader, ToolCall

BEGIN, END = "<tool_call>", "</tool_call>"


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    yield from read_tagged(reader, tools.read)


def read_tagged(reader: TextReader, calls_in: Callable[[str], list[ToolCall] | None]) -> Reading[None]:
    """Read content, and calls between tags, which `calls_in` finds in the text between two of them."""
    while True:
        begin = yield from reader.until((BEGIN,), reader.content)
        if not begin.marker:
            return
        text, end = yield from reader.collect(END)
        reader.calls_or_text(calls_in(text), begin.text + text + end.text)
