"""Calls whose arguments stand in the text as a JSON object: read in pieces, and given in pieces where that is wanted.

A call begins in a stream when its function is known and what is written up to the bracket that opens the arguments has
the format. Should the arguments break off or turn out to be no JSON, the call that has begun ends incomplete, and what
follows is text. In an answer that is given as a whole, all of that is text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bigmodel.server.answers.parsers.calls import Tools, read_json
from bigmodel.server.answers.parsers.object_text import ObjectText
from bigmodel.server.answers.parsers.reader import Reading, TextReader

_ANY = re.compile(".", re.DOTALL)
_UP_TO_BRACKET = re.compile(r"[^{]|\{[^{}\[\]<]*[{}\[\]<]")
_STRING = r'"(?:[^"\\]|\\.)*"'
_OTHER = rf'(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*'
_HEAD = re.compile(
    rf'\{{\s*{_OTHER}"name"\s*:\s*({_STRING})\s*,\s*{_OTHER}"(?:arguments|parameters)"\s*:\s*\{{', re.ASCII
)


@dataclass(frozen=True)
class CallText:
    """A call as far as it was read.

    Args:
        text: What was read of it: a beginning, and the arguments.
        arguments: The arguments, as they are given.
        complete: Whether they are an object.
        begun: Whether they were given as they came.
    """

    reader: TextReader
    tools: Tools
    name: str
    text: str
    arguments: str
    complete: bool
    begun: bool

    def close(self, tail: str, *, fits: bool, before: str = "", end: str = "") -> bool:
        """Give the call, or text where it is none; return whether it is one, or has begun as one.

        Args:
            tail: What follows the arguments.
            fits: Whether the format has that there.
            before: What was written before.
            end: The marker that follows.
        """
        if self.begun:
            if not (self.complete and fits):
                self.reader.content(tail)
            return True
        call = self.tools.of_text(self.name, self.arguments) if self.complete and fits else None
        return self.reader.calls_or_text(call, before + self.text + tail + end)


def read_arguments(
    reader: TextReader, tools: Tools, name: str, stop: tuple[str, ...] = (), *, head: str = ""
) -> Reading[CallText | None]:
    """Read the arguments of a function, up to one of the markers ``stop``; None if none begin here.

    ``head``: what has been read of the call.
    """
    if not tools.has(name) or (yield from reader.ahead(_ANY)) != "{":
        return None
    text, pieces = ObjectText(), list[str]()
    begun = reader.streams and tools.streams(name)
    if begun:
        reader.begin_call(name)
    taken = yield from reader.object(text, reader.arguments if begun else pieces.append, stop)
    complete = text.state == "complete"
    if begun:
        reader.end_call(complete=complete)
    return CallText(reader, tools, name, head + taken, "".join(pieces), complete, begun)


def read_called(reader: TextReader, tools: Tools, stop: tuple[str, ...] = ()) -> Reading[CallText | None]:
    """Read an object with a `name` and the `arguments` or `parameters`, and these; None if none is here."""
    ahead = yield from reader.ahead(_UP_TO_BRACKET)
    found = _HEAD.fullmatch(ahead)
    name = None if found is None else read_json(found[1])
    if not isinstance(name, str) or not tools.has(name):
        return None
    head = reader.take_next(len(ahead) - 1)
    return (yield from read_arguments(reader, tools, name, stop, head=head))


def read_named(reader: TextReader, tools: Tools, name: str, before: str) -> Reading[None]:
    """Read the arguments of a function with nothing behind them; ``before`` is given back if they are none."""
    before += yield from reader.space()
    called = yield from read_arguments(reader, tools, name)
    if called is None:
        reader.content(before)
    elif called.complete:
        called.close("", fits=True, before=before)
    else:
        text = yield from reader.value("{", called.text)
        called.close(text[len(called.text) :], fits=False, before=before)


def ends_object(tail: str) -> bool:
    """Whether a text is what may follow a value in an object, and its end; models write brackets too many behind it."""
    last = tail.rstrip()
    return any(isinstance(read_json('{"": 0' + each), dict) for each in (last, last.removesuffix("}")))


def read_object(reader: TextReader, tools: Tools, before: str) -> Reading[bool]:
    """Read the calls of a JSON object, and return whether it is any; what is none is given back with ``before``."""
    before += yield from reader.space()
    called = yield from read_called(reader, tools)
    if called is None:
        text = yield from reader.value("{")
        return reader.calls_or_text(tools.read(text), before + text)
    text = yield from reader.value("{", called.text)
    tail = text[len(called.text) :]
    return called.close(tail, fits=ends_object(tail), before=before)


def read_list(reader: TextReader, tools: Tools, before: str) -> Reading[None]:
    """Read the calls of a JSON list, each as soon as it is complete.

    ``before``: what of the list has been read, its bracket included; given back if the first value is no call.
    """
    while (yield from read_object(reader, tools, before)):
        before = yield from reader.space()
        comma = yield from reader.starts(",", "]")
        before += comma
        if comma != ",":
            if comma != "]":
                reader.content(before)
            return
