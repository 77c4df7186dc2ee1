"""Calls of Qwen 3 Coder, Qwen 3.5 and others: tags for a function and for each argument, within `<tool_call>` tags."""

from __future__ import annotations

from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.hermes import read_tagged
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Reading, TextReader

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    yield from read_tagged(reader, lambda text: _calls(text, tools))


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
