"""Calls of DeepSeek V3.2 and MiniMax M2: tags for a function and each argument, which have the names, in a block.

`<invoke name="f"><parameter name="x">1</parameter></invoke>`; DeepSeek's tags have a prefix, and those of arguments say
whether the value is a text or JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bigmodel.server.answers.parsers.call_end import TaggedValues, collect_call
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Reading, TextReader

_NAME = re.compile(r'([^"<>]+)"\s*>\s*')


@dataclass(frozen=True)
class InvokeMarks:
    """The tags of a family: around a block of calls, of any of these names, and what tags of calls begin with.

    ``typed``: whether tags of arguments say which values are texts.
    """

    blocks: tuple[tuple[str, str], ...]
    prefix: str = ""
    typed: bool = False

    @property
    def call(self) -> str:
        """What a call begins with, up to the name of its function."""
        return f'<{self.prefix}invoke name="'

    @property
    def call_end(self) -> str:
        """The tag behind a call."""
        return f"</{self.prefix}invoke>"

    @property
    def argument(self) -> str:
        """What an argument begins with, up to its name."""
        return f'<{self.prefix}parameter name="'

    @property
    def argument_end(self) -> str:
        """The tag behind an argument."""
        return f"</{self.prefix}parameter>"

    @property
    def all(self) -> tuple[str, ...]:
        """All of them that may be special tokens, or the part of the tags that is one."""
        return (*(tag for tags in self.blocks for tag in tags), *([self.prefix] if self.prefix else []))


DSML = "｜DSML｜"
DEEPSEEK = InvokeMarks(
    tuple((f"<{DSML}{name}>", f"</{DSML}{name}>") for name in ("function_calls", "tool_calls")), DSML, typed=True
)
MINIMAX = InvokeMarks((("<minimax:tool_call>", "</minimax:tool_call>"),))


def reading(marks: InvokeMarks) -> Callable[[TextReader, Tools], Reading[None]]:
    """Return the parser of a family."""
    begin = re.compile(rf'{marks.argument}([^"<>]+)"(?:\s+string="(true|false)")?\s*>')
    end = re.compile(rf"{marks.argument_end}\s*(?={marks.argument}|{marks.call_end}|\Z)")
    call = _Calls(marks, begin, end)
    return lambda reader, tools: call.read(reader, tools)


class _Calls:
    def __init__(self, marks: InvokeMarks, begin: re.Pattern[str], end: re.Pattern[str]) -> None:
        self._marks = marks
        self._begin = begin
        self._end = end

    def read(self, reader: TextReader, tools: Tools) -> Reading[None]:
        """Read content and calls."""
        ends = dict(self._marks.blocks)
        while True:
            begin = yield from reader.until(tuple(ends), reader.content)
            if not begin.marker:
                return
            yield from self._block(reader, tools, begin.text, ends[begin.marker])

    def _block(self, reader: TextReader, tools: Tools, before: str, end: str) -> Reading[None]:
        """Read the calls of one block. Its first tag, ``before``, and its last one are given back if it has none."""
        called = False
        while True:
            text, found = yield from reader.collect(self._marks.call, end)
            before += text + found.gap
            if found.marker != self._marks.call:
                if not called or before.strip():
                    reader.content(before + found.marker)
                return
            if text.strip():
                reader.content(before)
                before = ""
            values = TaggedValues(self._begin, self._end)
            inner, close = yield from collect_call(
                reader, self._marks.call_end, values, lambda each: self._call(each, tools) is not None
            )
            call = self._call(inner, tools)
            called |= reader.calls_or_text(call, before + found.marker + inner + close.text)
            before = ""

    def _call(self, text: str, tools: Tools) -> ToolCall | None:
        """The call that a text is, from the name of the function on."""
        head = _NAME.match(text)
        if head is None:
            return None
        name, at = head[1], head.end()
        arguments: dict[str, Any] = {}
        while at < len(text):
            begin = self._begin.match(text, at)
            end = None if begin is None else self._end.search(text, begin.end())
            if begin is None or end is None:
                return None
            value = text[begin.end() : end.start()]
            is_text = begin[2] == "true" and tools.takes(name, begin[1], value)
            arguments[begin[1]] = value if is_text else tools.argument(name, begin[1], value)
            at = end.end()
        return tools.call(name, arguments)
