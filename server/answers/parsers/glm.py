"""GLM 4.5's calls: a function's name, and pairs of tags for each argument, within `<tool_call>` tags."""

from __future__ import annotations

import re

from bigmodel.server.answers.parsers.call_end import TaggedValues
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.hermes import read_tagged
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Reading, TextReader

KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"

_VALUE = re.compile(VALUE)
_VALUE_END = re.compile(rf"{VALUE_END}\s*(?={KEY}|\Z)")


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls. A value ends with its tag if another argument or the end of the call follows."""
    yield from read_tagged(reader, lambda: TaggedValues(_VALUE, _VALUE_END), lambda text: _calls(text, tools))


def _calls(text: str, tools: Tools) -> list[ToolCall] | None:
    name, begin, rest = text.partition(KEY)
    name = name.strip()
    arguments = {}
    while begin:
        key, closed, rest = rest.partition(KEY_END)
        rest = rest.lstrip()
        end = _VALUE_END.search(rest)
        if not (closed and rest.startswith(VALUE) and end):
            return None
        key = key.strip()
        arguments[key] = tools.argument(name, key, rest[len(VALUE) : end.start()])
        begin, rest = rest[end.end() :][: len(KEY)], rest[end.end() + len(KEY) :]
    call = tools.call(name, arguments)
    return None if call is None else [call]
