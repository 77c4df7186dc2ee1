"""DeepSeek's calls, V3 and R1 with a kind, a name and fenced JSON for each, V3.1 with a name and JSON."""

from __future__ import annotations

from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import Reading, TextReader, ToolCall

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    while True:
        begin = yield from reader.until((CALLS,), reader.content)
        if not begin.marker:
            return
        yield from _block(reader, tools, begin.text)


def _block(reader: TextReader, tools: Tools, before: str) -> Reading[None]:
    """Read the calls of one block. Its first marker, ``before``, and its last one are given back if it has none."""
    called = False
    while True:
        text, found = yield from reader.collect(CALL, CALLS_END)
        if text or not found.marker:
            reader.content(before + text)
            before = ""
        if found.marker != CALL:
            if not called:
                reader.content(before + found.text)
            return
        head, middle = yield from reader.collect(SEPARATOR, CALL_END)
        body, rest = "", ""
        if middle.marker == SEPARATOR:
            body, end = yield from reader.collect(CALL_END)
            rest = body + end.text
        call = _call(tools, head.strip(), body)
        called |= reader.calls_or_text(call, before + found.text + head + middle.text + rest)
        before = ""


def _call(tools: Tools, head: str, body: str) -> ToolCall | None:
    if head != "function":
        return tools.call(head, body)
    name, _, rest = body.strip().partition("\n")
    return tools.call(name.strip(), rest.strip().removeprefix(FENCE).removeprefix("json").removesuffix(FENCE))
