"""Calls of GLM 4 (glm-4-9b-chat, GLM-4-0414): the name of a function as the first line, and JSON behind it."""

from __future__ import annotations

from bigmodel.server.answers.parsers.call_text import read_named
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import Reading, TextReader

NEXT = "<|assistant|>"
"""What stands before a further call."""


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    before = ""
    while True:
        before += yield from reader.space()
        name = yield from reader.starts(*(f"{name}\n" for name in tools.names))
        if name:
            yield from read_named(reader, tools, name[:-1], before + name)
        else:
            reader.content(before)
        found = yield from reader.until((NEXT,), reader.content)
        if not found.marker:
            return
        before = found.text
