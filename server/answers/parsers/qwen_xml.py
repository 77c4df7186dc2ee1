"""Calls of Qwen 3 Coder, Qwen 3.5 and others: tags for a function and for each argument, within `<tool_call>` tags."""

from __future__ import annotations

import re

from bigmodel.server.answers.parsers.call_end import TaggedValues, collect_call
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.hermes import BEGIN, END
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Reading, TextReader

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

_NAME = re.compile(r"[^<>\s]*[<>\s]")
_VALUE = re.compile(rf"{PARAMETER}[^<>\s]*>")
_VALUE_END = re.compile(rf"{PARAMETER_END}\s*(?={PARAMETER}|{FUNCTION_END}|\Z)")
_LAST_VALUE_END = re.compile(rf"{PARAMETER_END}\s*(?={PARAMETER}|\Z)")


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls. A value ends with its tag if another argument or the end of the call follows."""
    while True:
        begin = yield from reader.until((BEGIN, FUNCTION), reader.content)
        if begin.marker == BEGIN:
            values = TaggedValues(_VALUE, _VALUE_END)
            text, end = yield from collect_call(
                reader, END, values, lambda each: _calls(each, tools) is not None, BEGIN
            )
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
    text, end = yield from collect_call(
        reader,
        FUNCTION_END,
        TaggedValues(_VALUE, _VALUE_END),
        lambda each: _calls(FUNCTION + each + FUNCTION_END, tools) is not None,
        FUNCTION,
    )
    if reader.calls_or_text(_calls(FUNCTION + text + end.marker, tools), before + text + end.text):
        space = yield from reader.space()
        if not (yield from reader.starts(END)):
            reader.content(space)


def _calls(text: str, tools: Tools) -> list[ToolCall] | None:
    text = text.strip()
    if not (text.startswith(FUNCTION) and text.endswith(FUNCTION_END)):
        return None
    name, closed, rest = text[len(FUNCTION) : -len(FUNCTION_END)].partition(">")
    rest = rest.lstrip()
    arguments = {}
    while closed and rest:
        key, closed, rest = rest.removeprefix(PARAMETER).partition(">") if rest.startswith(PARAMETER) else ("", "", "")
        end = _LAST_VALUE_END.search(rest)
        if end is None:
            return None
        value = rest[: end.start()].removeprefix("\n").removesuffix("\n")
        arguments[key] = tools.argument(name, key, value)
        rest = rest[end.end() :]
    call = tools.call(name, arguments) if closed else None
    return None if call is None else [call]
