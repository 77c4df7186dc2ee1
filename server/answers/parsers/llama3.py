"""Llama 3's calls: `{"name": "f", "parameters": {...}}` as the answer, or after `<|python_tag|>`.

Also the other forms of Meta's documentation: a list `[f(a="x"), g()]` as the answer, `f.call(a="x")` after the tag, and
`<function=f>{...}</function>`.
"""

from __future__ import annotations

import re

from bigmodel.server.answers.parsers.call_text import read_arguments, read_object
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import Reading, TextReader

TAG = "<|python_tag|>"
FUNCTION, FUNCTION_END = "<function=", "</function>"

_UP_TO_CALL = re.compile(r"[^\[]|\[\s*[\w.]*\s*[^\w.\s]|\[\s*[\w.]+\s+[\w.]")
_WORD = re.compile(r"[\w.]*[^\w.]")
_NAME = re.compile(r"[^<>\s]*[<>\s]")


def read(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read content and calls."""
    yield from read_first(reader, tools, (yield from reader.space()))
    while True:
        begin = yield from reader.until((TAG, FUNCTION), reader.content)
        if begin.marker == TAG:
            yield from _behind_tag(reader, tools, begin.text)
        elif begin.marker:
            yield from _function(reader, tools, begin.text)
        else:
            return


def read_first(reader: TextReader, tools: Tools, before: str) -> Reading[bool]:
    """Read calls that follow at once, as a list in Python or as JSON; return whether there are any.

    ``before``: what was written before them; given back if there is none.
    """
    ahead = yield from reader.ahead(_UP_TO_CALL)
    if ahead.startswith("[") and ahead.endswith("("):
        text = yield from reader.value("[")
        return reader.calls_or_text(tools.read_python(text), before + text)
    return (yield from _calls(reader, tools, before))


def _calls(reader: TextReader, tools: Tools, before: str) -> Reading[bool]:
    """Read calls up to something else; ``before`` is given back if there is none."""
    called = False
    while (yield from read_object(reader, tools, before)):
        called = True
        before = yield from reader.space()
        before += yield from reader.starts(";")
    return called


def _behind_tag(reader: TextReader, tools: Tools, before: str) -> Reading[None]:
    """Read calls as JSON, or as the Python that ends the answer."""
    before += yield from reader.space()
    name, call, _ = (yield from reader.ahead(_WORD)).partition("(")
    if call and (tools.has(name) or tools.has(name.removesuffix(".call"))):
        text, _ = yield from reader.collect()
        reader.calls_or_text(tools.read_python(text), before + text)
    else:
        yield from _calls(reader, tools, before)


def _function(reader: TextReader, tools: Tools, before: str) -> Reading[None]:
    """Read the name of a function and its arguments."""
    name = yield from reader.ahead(_NAME)
    if not (name.endswith(">") and tools.has(name[:-1])):
        reader.content(before)
        return
    before += reader.take_next(len(name)) + (yield from reader.space())
    called = yield from read_arguments(reader, tools, name[:-1], (FUNCTION_END,))
    text, end = yield from reader.collect(FUNCTION_END)
    if called is None:
        reader.content(before + text + end.text)
    else:
        called.close(text, fits=not text.strip(), before=before, end=end.text)
