"""Answers as a model writes them, read at once and in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bigmodel.server.answers.parsers.formats import TOOL_FORMATS, AnswerFormat, ModelFormats
from bigmodel.server.answers.parsers.parts import (
    AnswerPart,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "get_time": {"type": "object", "properties": {"zone": {"type": "string"}}},
}


@dataclass
class Answer:
    """What was found in a text; `written`: the arguments of the calls; `broken`: calls that began and broke off."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    written: list[str] = field(default_factory=list, compare=False)
    broken: list[tuple[str, str]] = field(default_factory=list)

    _begun: tuple[str, str] = field(default=("", ""), compare=False)

    def add(self, parts: Iterable[AnswerPart]) -> None:
        for part in parts:
            if isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            elif isinstance(part, CallBegun):
                self._begun = part.name, ""
            elif isinstance(part, Arguments):
                self._begun = self._begun[0], self._begun[1] + part.text
            elif isinstance(part, CallEnded) and not part.complete:
                self.broken.append(self._begun)
            else:
                name, arguments = self._begun if isinstance(part, CallEnded) else (part.name, part.arguments)
                self.calls.append((name, json.loads(arguments)))
                self.written.append(arguments)


def form(tools: str | None = None, reasoning: str | None = None, **more: Any) -> AnswerFormat:
    return AnswerFormat(ModelFormats(tools, reasoning), schemas=SCHEMAS, **more)


def special(tools: str) -> dict[str, int]:
    """All markers of a format as special tokens."""
    return {marker: number for number, marker in enumerate(TOOL_FORMATS[tools].markers)}


def read_pieces(how: AnswerFormat, pieces: Iterable[str]) -> Answer:
    answer = Answer()
    parser = how.parser()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    return answer


def read(how: AnswerFormat, text: str) -> Answer:
    """What is found in a text, however it is cut in two, and letter by letter."""
    whole = read_pieces(how, [text])
    assert read_pieces(how, text) == whole
    for cut in range(1, len(text)):
        assert read_pieces(how, [text[:cut], text[cut:]]) == whole, f"cut at {cut}"
    return whole
