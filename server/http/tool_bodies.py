"""Tools of chats, and which of them an answer is to call."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, WithJsonSchema, model_validator

from bigmodel.server.answers.parsers.schema_check import unchecked_keyword
from bigmodel.server.http.bodies import Body, FreeObject, Text, disagrees, string_or_type

MAX_TOOLS = 512

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")


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


def few_tools(given: Any) -> Any:
    """Return a list of tools if it has no more than are accepted; checked before the tools are."""
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


ToolList = Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(few_tools), AfterValidator(_distinct)]


class FunctionChoice(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionChoice


class AllowedTools(Body):
    """The tools that may be called, of all that are given; the chat template shows all of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True), BeforeValidator(few_tools)]


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a string")]
    | Annotated[NamedTool, Tag("the type function")]
    | Annotated[AllowedToolsChoice, Tag("the type allowed_tools")],
    string_or_type("function", "allowed_tools"),
]
