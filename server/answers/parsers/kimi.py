"""Kimi K2's calls: an identifier `functions.name:number` and JSON for each, between markers."""

from __future__ import annotations

import re

from bigmodel.server.answers.parsers.call_sections import SectionMarks, read_sections
from bigmodel.server.answers.parsers.call_text import read_arguments
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import Reading, TextReader

MARKS = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)

_IDENTIFIER = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    yield from read_sections(reader, MARKS, lambda head, before: _call(reader, tools, head, before))


def _call(reader: TextReader, tools: Tools, head: str, before: str) -> Reading[bool]:
    found = _IDENTIFIER.fullmatch(head)
    before += yield from reader.space()
    call = yield from read_arguments(reader, tools, found[1] if found else "", (MARKS.call_end,))
    text, end = yield from reader.collect(MARKS.call_end)
    if call is None:
        reader.content(before + text + end.text)
        return False
    return call.close(text, fits=not text.strip(), before=before, end=end.text)


def new_id(name: str, number: int) -> str:
    """Return an identifier of a conversation's call with a ``number``: chat templates take the name from it."""
    return f"functions.{name}:{number}"
