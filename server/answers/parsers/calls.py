"""From what a model wrote to a call of one of the functions that it was given."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from bigmodel.server.answers.parsers.object_text import ObjectText
from bigmodel.server.answers.parsers.parts import ToolCall
from bigmodel.server.answers.parsers.python_calls import python_calls
from bigmodel.server.answers.parsers.schema_check import fits, fits_part
from bigmodel.server.answers.parsers.value_grammars import read_value


class Tools:
    """The functions that an answer may call.

    Args:
        schemas: JSON schemas of their arguments, by name.
        strict: Names of those whose arguments have to fit their schema.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], strict: Collection[str] = ()) -> None:
        self._schemas = schemas
        self._strict = strict

    def call(self, name: Any, arguments: Any) -> ToolCall | None:
        """Return a call; None if there is no such function, or its arguments are no object or do not fit.

        ``arguments``: an object, or the JSON text of one.
        """
        if not isinstance(name, str) or name not in self._schemas:
            return None
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if not isinstance(arguments, dict):
            return None
        if name in self._strict and not fits(arguments, self._schemas[name]):
            return None
        text = _written(arguments)
        return None if text is None else ToolCall(name, text)

    @property
    def names(self) -> list[str]:
        """Names of the functions."""
        return list(self._schemas)

    def has(self, name: str) -> bool:
        """Whether a function may be called."""
        return name in self._schemas

    def streams(self, name: str) -> bool:
        """Whether the arguments of a function may be sent before they are complete: they have to be an object only."""
        return name not in self._strict

    def of_text(self, name: str, arguments: str) -> ToolCall | None:
        """Return a call with arguments as they were written; None if they do not fit."""
        return None if self.call(name, arguments) is None else ToolCall(name, arguments)

    def read(self, text: str) -> list[ToolCall] | None:
        """Return the calls in the JSON text of an object, or of a list of them; None if any part of it is no call."""
        value = _read_json_or_python(text)
        objects = value if isinstance(value, list) else [value]
        calls = [call for one in objects if (call := self._of_object(one)) is not None]
        return calls if calls and len(calls) == len(objects) else None

    def read_python(self, text: str) -> list[ToolCall] | None:
        """Return the calls in a text that is Python; None if any part of it is no call."""
        calls = []
        for one in python_calls(text) or ():
            name = one.name if self.has(one.name) else one.name.removesuffix(".call")
            names = list(self.parameters(name))
            if len(one.positional) > len(names):
                return None
            arguments = {**dict(zip(names, one.positional)), **one.named}
            if len(arguments) == len(one.positional) == 1 and isinstance(one.positional[0], dict):
                arguments = one.positional[0] if one.positional[0].keys() <= set(names) else arguments
            calls.append(self.call(name, arguments))
        known = [call for call in calls if call is not None]
        return known if known and len(known) == len(calls) else None

    def _of_object(self, value: Any) -> ToolCall | None:
        """The call that an object says: ``name``, and ``arguments`` or ``parameters``; also within ``function``."""
        if not isinstance(value, dict):
            return None
        inner = value.get("function")
        if isinstance(inner, dict):
            value = inner
        name = value.get("name", inner)
        return self.call(name, value.get("arguments", value.get("parameters")))

    def parameters(self, name: str) -> dict[str, Any]:
        """Schemas of a function's arguments by name, in their order."""
        found = self._schemas.get(name, {}).get("properties")
        return found if isinstance(found, dict) else {}

    def takes(self, name: str, key: str, value: Any) -> bool:
        """Whether a value fits the schema of an argument."""
        return fits_part(value, self.parameters(name).get(key, True), self._schemas.get(name, {}))

    def argument(self, name: str, key: str, text: str) -> Any:
        """Return the value of an argument written as plain text, of a type that its schema has."""
        return read_value(text, read_json(text), self.parameters(name).get(key), self._schemas.get(name, {}))


def read_json(text: str) -> Any:
    """Return the value of a JSON text, which may have line breaks in its strings; None if it is none."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _read_json_or_python(text: str) -> Any:
    """As :func:`read_json`; also of an object with Python's strings and constants, or brackets too many behind it."""
    value = read_json(text)
    text = text.strip()
    if value is not None or not text.startswith("{"):
        return value
    checked = ObjectText()
    used, written = checked.read(text, last=True)
    ends = checked.state == "complete" and not text[used:].strip("} \t\r\n")
    return read_json(written) if ends else None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _written(arguments: dict[str, Any]) -> str | None:
    """JSON text of arguments; None if they cannot be written as JSON."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can escape
        return json.dumps(arguments)
    return text
