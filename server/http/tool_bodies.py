"""Tools in the bodies of chats: the functions that an answer may call, which it has to, and earlier calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from bigmodel.server.answers.parsers.schema_check import unchecked_keyword
from bigmodel.server.http.body_types import Body, FreeObject, Text, disagrees
from bigmodel.server.http.json_bounds import CONTAINERS, JSONBoundsError

MAX_TOOLS = 512

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")

_ARGUMENT_VALUES = 100_000
"""Most commas in the arguments of a conversation's calls, which are JSON texts within JSON."""


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("a function's name has 1 to 64 letters, digits and characters of _ - . : /")
    return text


FunctionName = Annotated[
    Text, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})
]


class Function(Body):
    name: FunctionName
    description: Text | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> Function:
        if (self.parameters or {}).get("type", "object") != "object":
            raise disagrees("parameters.type", "must be 'object': a function's arguments have names")
        unchecked = unchecked_keyword(self.parameters) if self.strict else None
        if unchecked is not None:
            raise disagrees("parameters", f"'{unchecked}' is not supported for a strict function")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema of the arguments."""
        return {"type": "object", **(self.parameters or {"properties": {}})}


class Tool(Body):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": self.type, "function": {**function, "parameters": self.function.arguments}}


def _few(given: Any) -> Any:
    if isinstance(given, list) and len(given) > MAX_TOOLS:
        raise ValueError(f"has {len(given)} tools; at most {MAX_TOOLS} are accepted")
    return given


def _distinct(tools: list[Tool]) -> list[Tool]:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise disagrees(f"{index}.function.name", f"'{tool.function.name}' is the name of another tool too")
        names.add(tool.function.name)
    return tools


ToolList = Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(_few), AfterValidator(_distinct)]


class FunctionChoice(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionChoice


def _shape(given: Any) -> str:
    return "an object" if isinstance(given, dict | NamedTool) else "a string"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a string")] | Annotated[NamedTool, Tag("an object")],
    Discriminator(_shape),
]


# --- earlier calls ------------------------------------------------------------------------------------


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
