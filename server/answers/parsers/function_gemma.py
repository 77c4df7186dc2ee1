"""FunctionGemma's and Gemma 4's calls: `call:f{key:<escape>text<escape>,days:3}` between two markers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bigmodel.server.answers.parsers.call_end import QuotedValues, collect_call
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.reader import Reading, TextReader

_DEPTH = 32
_CALL = re.compile(r"\s*call:\s*([^\s{]+)\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BARE = re.compile(r"[^,:{}\[\]]*")


@dataclass(frozen=True)
class Marks:
    """The markers of a family: before and behind a call, around a text, and of the result that the client adds."""

    begin: str
    end: str
    quote: str
    result: str

    @property
    def all(self) -> tuple[str, ...]:
        """All of them."""
        return (self.begin, self.end, self.quote, self.result)


FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")
GEMMA_4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


def reading(marks: Marks) -> Callable[[TextReader, Tools], Reading[None]]:
    """Return the parser of a family."""
    return lambda reader, tools: _read(reader, tools, marks)


def _read(reader: TextReader, tools: Tools, marks: Marks) -> Reading[None]:
    """Read content and calls. The marker of a result, with which the model stops behind its calls, is none of both."""

    def call_in(text: str) -> ToolCall | None:
        return _call(text, tools, marks.quote)

    called = False
    while True:
        begin = yield from reader.until((marks.begin, marks.result), reader.content)
        if begin.marker == marks.begin:
            values = QuotedValues(marks.quote)
            text, end = yield from collect_call(reader, marks.end, values, lambda each: call_in(each) is not None)
            called |= reader.calls_or_text(call_in(text), begin.text + text + end.text)
        elif not begin.marker:
            return
        elif not called:
            reader.content(begin.text)


def _call(text: str, tools: Tools, quote: str) -> ToolCall | None:
    head = _CALL.match(text)
    if head is None:
        return None
    try:
        arguments = _Values(text, head.end(), quote).all()
    except _NoValueError:
        return None
    return tools.call(head[1], arguments)


class _NoValueError(ValueError):
    """A text is something else."""


class _Values:
    """Reads a value of the format: objects and lists as in JSON, texts between quotes, other texts as they are."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self._text = text
        self._at = at
        self._quote = quote

    def all(self) -> Any:
        """The object that the text ends with."""
        if not self._skips("{"):
            raise _NoValueError
        found = self._members(0)
        if self._text[self._at :].strip():
            raise _NoValueError
        return found

    def _value(self, depth: int) -> Any:
        if depth > _DEPTH:
            raise _NoValueError
        if self._skips("{"):
            return self._members(depth)
        if self._skips("["):
            return self._items(depth)
        return self._scalar()

    def _members(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._skips("}"):
            key = self._quoted()
            key = self._bare() if key is None else key
            if not key or not self._skips(":"):
                raise _NoValueError
            members[key] = self._value(depth + 1)
            self._comma("}")
        return members

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._skips("]"):
            items.append(self._value(depth + 1))
            self._comma("]")
        return items

    def _scalar(self) -> Any:
        quoted = self._quoted()
        if quoted is not None:
            return quoted
        text = self._bare()
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if value == "":
            raise _NoValueError
        return value

    def _quoted(self) -> str | None:
        """The text between two quotes, of the format or of JSON; None if none begins here."""
        if self._skips(self._quote):
            text, closed, _ = self._text[self._at :].partition(self._quote)
            if not closed:
                raise _NoValueError
            self._at += len(text) + len(closed)
            return text
        found = _STRING.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        try:
            return str(json.loads(found[0], strict=False))
        except ValueError:
            raise _NoValueError from None

    def _bare(self) -> str:
        found = _BARE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found[0].strip()

    def _comma(self, closing: str) -> None:
        if not self._skips(",") and not self._text.startswith(closing, self._at):
            raise _NoValueError

    def _skips(self, sign: str) -> bool:
        """Take white space and then a sign, if it is there."""
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        found = self._text.startswith(sign, self._at)
        self._at += len(sign) if found else 0
        return found
