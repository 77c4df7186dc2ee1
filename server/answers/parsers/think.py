"""Reasoning between two tags, before the answer: `<think>` of most models, `[THINK]` of Mistral's."""

from __future__ import annotations

from bigmodel.server.answers.parsers.reader import Reading, TextReader


def read(reader: TextReader, begin: str, end: str, *, opened: bool) -> Reading[None]:
    """Read the reasoning, if the text begins with it. ``opened``: the prompt has the first tag.

    Reasoning that does not end is the whole text.
    """
    space = yield from reader.space()
    began = yield from reader.starts(begin)
    if not (opened or began):
        reader.content(space)
        return
    if began:
        yield from reader.space()
    found = yield from reader.until((end,), reader.reasoning)
    if found.marker:
        yield from reader.space()
