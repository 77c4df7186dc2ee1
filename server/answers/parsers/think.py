"""Reasoning between two tags, before the answer: `<think>` of most models, `[THINK]` of Mistral's."""

from __future__ import annotations

import re

from bigmodel.server.answers.parsers.reader import Found, Reading, TextReader

_ANY = re.compile(".", re.DOTALL)


def read(
    reader: TextReader, begin: str, end: str, *, opened: bool, calls: tuple[str, str] | None = None
) -> Reading[None]:
    """Read the reasoning, if the text begins with it. Reasoning that does not end is the whole text, but for calls.

    Args:
        begin: The first tag.
        end: The last tag.
        opened: Whether the prompt has the first tag.
        calls: The markers around calls. Where the answer ends with calls and the last tag is missing, they are left.
    """
    space = yield from reader.space()
    began = yield from reader.starts(begin)
    if not (opened or began):
        reader.content(space)
        return
    if began:
        yield from reader.space()
    markers = (end,) if calls is None else (end, calls[0])
    while True:
        found = yield from reader.until(markers, reader.reasoning)
        if calls is not None and found.marker == calls[0]:
            found = yield from _behind_calls(reader, end, calls, found.text)
        if found.marker == end:
            yield from reader.space()
        if found.marker in (end, ""):
            return


def _behind_calls(reader: TextReader, end: str, calls: tuple[str, str], text: str) -> Reading[Found]:
    """Read on behind a first marker of calls, which is in ``text``; leave calls that end the answer."""
    while True:
        text += yield from reader.space()
        inner, found = yield from reader.collect_object(calls[1], end)
        if found.marker == end:
            reader.reasoning(text + inner)
            return found
        text += inner + found.text
        space = yield from reader.space()
        if not (yield from reader.ahead(_ANY)):
            reader.give_back(text)
            return Found("", "")
        again = yield from reader.starts(calls[0])
        if not again:
            reader.give_back(space)
            reader.reasoning(text)
            return found
        text += space + again
