"""Llama 4's calls: a list `[f(a="x"), g()]`, or JSON as Llama 3's, as the answer or between two markers."""

from __future__ import annotations

from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.llama3 import read_first
from bigmodel.server.answers.parsers.reader import Reading, TextReader

START, END = "<|python_start|>", "<|python_end|>"


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    before = ""
    while True:
        before += yield from reader.space()
        called = yield from read_first(reader, tools, before)
        begin = yield from reader.until((START, END) if called else (START,), reader.content)
        if begin.marker == END:
            begin = yield from reader.until((START,), reader.content)
        if not begin.marker:
            return
        before = begin.text
