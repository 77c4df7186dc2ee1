"""Mistral's calls: `[TOOL_CALLS][{...}, {...}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}` for each."""

from __future__ import annotations

import secrets
import string

from bigmodel.server.answers.parsers.call_text import read_list, read_named
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import Reading, TextReader

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    while True:
        begin = yield from reader.until((CALLS,), reader.content)
        if not begin.marker:
            return
        space = yield from reader.space()
        opening = yield from reader.starts("[", CALLS, CALL_ID, ARGS)
        before = begin.text + space + opening
        if opening == "[":
            yield from read_list(reader, tools, before)
        elif opening:
            reader.content(before)
        else:
            yield from _named(reader, tools, before)


def _named(reader: TextReader, tools: Tools, before: str) -> Reading[None]:
    """Read a name and its arguments; ``before`` is given back if they are none."""
    name, found = yield from reader.collect(CALL_ID, ARGS)
    before += name + found.text
    if found.marker == CALL_ID:
        call_id, found = yield from reader.collect(ARGS)
        before += call_id + found.text
    yield from read_named(reader, tools, name.strip(), before)


def new_id(name: str, number: int) -> str:
    """Return an identifier of a call in the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
