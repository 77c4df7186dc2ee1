"""Calls of Qwen 3 Coder, Qwen 3.5 and others: tags for a function and for each argument, within `<tool_call>` tags."""

from __future__ import annotations

import re

from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.hermes import BEGIN, END
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Reading, TextReader

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)


_NAME = re.compile(r"[^<>\s]*[<>\s]")


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    while True:
        begin = yield from reader.until((BEGIN, FUNCTION), reader.content)
        if begin.marker == BEGIN:
            text, end = yield from reader.collect(END)
            reader.calls_or_text(_calls(text, tools), begin.text + text + end.text)
        elif begin.marker:
            yield from _untagged(reader, tools, begin.text)
        else:
            return


def _untagged(reader: TextReader, tools: Tools, before: str) -> Reading[None]:
    """Read a call whose first tag the model has left out; the last one may be there."""
    name = yield from reader.ahead(_NAME)
    if not (name.endswith(">") and tools.has(name[:-1])):
        reader.content(before)
        return
    text, end = yield from reader.collect(FUNCTION_END)
    if reader.calls_or_text(_calls(FUNCTION + text + end.marker, tools), before + text + end.text):
        space = yield from reader.space()
        if not (yield from reader.starts(END)):
            reader.content(space)


def _calls(text: str, tools: Tools) -> list[ToolCall] | None:
    text = text.strip()
    if not (text.startswith(FUNCTION) and text.endswith(FUNCTION_END)):
        return None
    head, *parameters = text[len(FUNCTION) : -len(FUNCTION_END)].split(PARAMETER)
    name, closed, rest = head.partition(">")
    if not closed or rest.strip():
        return None
    arguments = {}
    for parameter in parameters:
        key, closed, rest = parameter.partition(">")
        value = rest.rstrip()
        if not closed or not value.endswith(PARAMETER_END):
            return None
        value = value.removesuffix(PARAMETER_END).removeprefix("\n").removesuffix("\n")
        arguments[key] = tools.argument(name, key, value)
    call = tools.call(name, arguments)
    return None if call is None else [call]
