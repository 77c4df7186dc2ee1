"""What answers are made of, as parsers find it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallBegun:
    """A call begins whose arguments come in pieces: :class:`Arguments`, and then :class:`CallEnded`."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of the call that has begun."""

    text: str


@dataclass(frozen=True)
class CallEnded:
    """The end of a call; where it is not ``complete``, the arguments are the beginning of a JSON object."""

    complete: bool


AnswerPart: TypeAlias = Content | Reasoning | ToolCall | CallBegun | Arguments | CallEnded
