"""GLM 4.5's calls: a function's name, and pairs of tags for each argument, within `<tool_call>` tags."""

from __future__ import annotations

from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.hermes import read_tagged
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Reading, TextReader

KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    yield from read_tagged(reader, lambda text: _calls(text, tools))


def _calls(text: str, tools: Tools) -> list[ToolCall] | None:
    head, *pairs = text.split(KEY)
    name = head.strip()
    arguments = {}
    for pair in pairs:
        key, _, rest = pair.partition(KEY_END)
        value = rest.strip()
        if not (value.startswith(VALUE) and value.endswith(VALUE_END)):
            return None
        key = key.strip()
        arguments[key] = tools.argument(name, key, value[len(VALUE) : -len(VALUE_END)])
    call = tools.call(name, arguments)
    return None if call is None else [call]
