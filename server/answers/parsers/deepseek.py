"""DeepSeek's calls, V3 and R1 with a kind, a name and fenced JSON for each, V3.1 with a name and JSON."""

from __future__ import annotations

import re

from bigmodel.server.answers.parsers.call_sections import SectionMarks, read_sections
from bigmodel.server.answers.parsers.call_text import read_arguments
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import Reading, TextReader

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MARKS = SectionMarks(CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)
FENCE = "```"

_UP_TO_BRACKET = re.compile(r"[^{<]*[{<]")


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    yield from read_sections(reader, MARKS, lambda name, before: _call(reader, tools, name, before))


def _call(reader: TextReader, tools: Tools, name: str, before: str) -> Reading[bool]:
    """Read what follows the name or the kind of a call; return whether it is a call, or has begun as one."""
    if name == "function":
        ahead = yield from reader.ahead(_UP_TO_BRACKET)
        name, _, rest = ahead.strip().partition("\n")
        if rest.endswith("{") and rest[:-1].strip() in ("", FENCE, f"{FENCE}json", "json"):
            name = name.strip()
            before += reader.take_next(len(ahead) - 1)
    else:
        before += yield from reader.space()
    call = yield from read_arguments(reader, tools, name, (CALL_END,))
    text, end = yield from reader.collect(CALL_END)
    if call is None:
        reader.content(before + text + end.text)
        return False
    return call.close(text, fits=text.strip() in ("", FENCE), before=before, end=end.text)
