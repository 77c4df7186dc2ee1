"""gpt-oss' messages: each has a channel, as analysis for reasoning or final for the answer, or a function it calls."""

from __future__ import annotations

import re

from bigmodel.server.answers.parsers.call_text import read_arguments
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import Found, Reading, Sink, TextReader

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")

_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]*)")


def read(reader: TextReader, tools: Tools, analysis: Sink) -> Reading[None]:
    """Read messages; the reasoning goes to `analysis`. The prompt may end within the header of the first message."""
    gap = yield from reader.space()
    opening = yield from reader.starts(START, CHANNEL, "to=")
    if not opening:
        reader.content(gap)
    while True:
        if not opening:
            gap, opening = yield from reader.until((START, CHANNEL), reader.content)
            if not opening:
                return
        header, end = yield from _header(reader, gap + opening)
        gap, opening = "", ""
        if end.marker != MESSAGE:
            reader.content(header + (end.gap if end.marker == START else end.text))
            opening = end.marker if end.marker == START else ""
            continue
        channel, function = _CHANNEL_NAME.search(header), _function(header, tools)
        ends = (*ENDS, START, CHANNEL)
        if function is not None:
            header += yield from reader.space()
            called = yield from read_arguments(reader, tools, function, ends)
            text, end = yield from reader.collect(*ends)
            closing = end.text if end.marker in ENDS else end.gap
            if called is None:
                reader.content(header + text + closing)
            else:
                called.close(text, fits=not text.strip(), before=header, end=closing)
        else:
            hidden = channel is not None and channel[1] == "analysis"
            end = yield from reader.until(ends, analysis if hidden else reader.content)
        if end.marker in (START, CHANNEL):
            opening = end.marker


def _header(reader: TextReader, opening: str) -> Reading[tuple[str, Found]]:
    """Return the header of a message as it was written, and the marker that ends it: of the text, if all is well."""
    header = opening
    while True:
        text, found = yield from reader.collect(CHANNEL, CONSTRAIN, MESSAGE, START, *ENDS)
        header += text
        if found.marker not in (CHANNEL, CONSTRAIN):
            return header + (found.text if found.marker == MESSAGE else ""), found
        header += found.text


def _function(header: str, tools: Tools) -> str | None:
    """The function that a message is to, without the `json` that the model writes at once behind some names."""
    found = _FUNCTION.search(header)
    if found is None:
        return None
    shorter = found[1].removesuffix("json")
    return shorter if tools.has(shorter) and not tools.has(found[1]) else found[1]
