"""Tools of a request as templates see them, and the calls of earlier answers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bigmodel.server.http.bodies import ChatBody, Message
from bigmodel.server.http.json_bounds import JSONBoundsError
from bigmodel.server.http.tool_bodies import Tool, check_arguments, with_object

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def test_templates_see_an_object_of_parameters_and_not_how_strict_it_is() -> None:
    given = {"type": "function", "function": {"name": "f", "description": "d", "strict": True}}
    assert Tool.model_validate(given).plain() == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    parameters = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
    given = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert Tool.model_validate(given).plain()["function"]["parameters"] == {"type": "object", **parameters}


@pytest.mark.parametrize(
    ("choice", "functions", "required", "single"),
    [
        (None, ["f", "g"], False, False),
        ("auto", ["f", "g"], False, False),
        ("none", [], False, False),
        ("required", ["f", "g"], True, False),
        ({"type": "function", "function": {"name": "g"}}, ["g"], True, True),
    ],
)
def test_the_choice_says_which_functions_may_be_called(
    choice: Any, functions: list[str], required: bool, single: bool
) -> None:
    body = chat(tools=TOOLS, tool_choice=choice)
    assert (list(body.functions), body.call_required, body.single_call) == (functions, required, single)
    assert chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).single_call


def test_what_is_not_checked_is_refused_in_a_strict_function() -> None:
    parameters = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": "a"}}}
    function = {"name": "f", "parameters": parameters}
    chat(tools=[{"type": "function", "function": function}])
    with pytest.raises(ValidationError, match="'pattern' is not supported for a strict function"):
        chat(tools=[{"type": "function", "function": {**function, "strict": True}}])


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_become_the_object_that_templates_expect(given: Any, seen: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    assert with_object(call) == {**call, "function": {"name": "f", "arguments": seen}}
    assert call["function"]["arguments"] == given  # type: ignore[index]


@pytest.mark.parametrize("call", [{}, {"function": None}, {"function": {"name": "f"}}])
def test_calls_without_arguments_are_unchanged(call: dict[str, Any]) -> None:
    assert with_object(call) == call


def test_an_earlier_answer_keeps_its_calls_and_its_reasoning() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."}
    assert Message.model_validate(said).plain() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "thinking": "Hm.",
        "tool_calls": [{**call, "function": {"name": "f", "arguments": {}}}],
    }
    assert "tool_calls" not in Message.model_validate({"role": "assistant", "tool_calls": []}).plain()


@pytest.mark.parametrize("text", ["[" * 30_000, "{" * 30_000, "," * 60_000])
def test_arguments_of_megabytes_are_not_parsed(text: str) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    check_arguments([call])
    with pytest.raises(JSONBoundsError, match="too many values"):
        check_arguments([call, call])
