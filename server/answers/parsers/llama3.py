"""Llama 3's calls: `{"name": "f", "parameters": {...}}` as the answer, or after `<|python_tag|>`."""

from __future__ import annotations

from bigmodel.server.answers.parsers.call_text import read_object
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import Reading, TextReader

TAG = "<|python_tag|>"


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    yield from _calls(reader, tools, "")
    while True:
        tag = yield from reader.until((TAG,), reader.content)
        if not tag.marker:
            return
        yield from _calls(reader, tools, tag.text)


def _calls(reader: TextReader, tools: Tools, before: str) -> Reading[None]:
    """Read calls up to something else; ``before`` is given back if there is none."""
    while (yield from read_object(reader, tools, before)):
        before = yield from reader.space()
        before += yield from reader.starts(";")
