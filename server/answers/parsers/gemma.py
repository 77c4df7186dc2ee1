"""Gemma's calls, in the forms of its documentation: Python in a block `tool_code`, or Python or JSON as the answer."""

from __future__ import annotations

from bigmodel.server.answers.parsers.call_end import CodeStrings, collect_call
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Reading, TextReader

CODE, JSON, END = "```tool_code", "```json", "```"


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    yield from _first(reader, tools)
    while True:
        begin = yield from reader.until((CODE,), reader.content)
        if not begin.marker:
            return
        yield from _fenced(reader, tools, begin.text)


def _first(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read the calls that the answer begins with."""
    space = yield from reader.space()
    fence = yield from reader.starts(JSON, CODE)
    if fence:
        yield from _fenced(reader, tools, space + fence)
        return
    while True:
        text = yield from reader.value("{[")
        if not reader.calls_or_text(_calls(text, tools), space + text):
            return
        space = yield from reader.space()


def _fenced(reader: TextReader, tools: Tools, before: str) -> Reading[None]:
    text, end = yield from collect_call(reader, END, CodeStrings(), lambda each: _calls(each, tools) is not None)
    reader.calls_or_text(_calls(text, tools), before + text + end.text)


def _calls(text: str, tools: Tools) -> list[ToolCall] | None:
    found = tools.read(text)
    return tools.read_python(text) if found is None else found
