"""Arguments of the calls in earlier answers: JSON texts within JSON, which chat templates expect as objects."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from bigmodel.server.http.json_bounds import CONTAINERS, JSONBoundsError

_ARGUMENT_VALUES = 100_000
"""Most commas in the arguments of a conversation's calls, which are JSON texts within JSON."""


def with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, which chat templates expect; clients send JSON text."""
    function = call.get("function")
    text = _arguments(call)
    if not isinstance(function, dict) or text is None:
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def check_arguments(calls: Iterable[dict[str, Any]]) -> None:
    """Raise JSONBoundsError where the arguments of all calls together have more values than any conversation needs."""
    containers = values = 0
    for text in filter(None, map(_arguments, calls)):
        containers += text.count("{") + text.count("[")
        values += text.count(",")
    if containers > CONTAINERS or values > _ARGUMENT_VALUES:
        raise JSONBoundsError("the arguments of its tool calls have too many values")


def _arguments(call: dict[str, Any]) -> str | None:
    """The arguments of a call as JSON text; None if they are none."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str) else None
