"""What a field may hold is checked beyond its Python type.

What cannot be is refused with the field at fault: alone, or together with another, or text that is no Unicode.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from bigmodel.server.http.bodies import MAX_STOP_LENGTH, FreeObject, Number, StopString, Text, TokenId
from bigmodel.server.http.chat_bodies import ChatBody, Message
from bigmodel.server.http.messages_bodies import MessagesBody
from bigmodel.server.http.responses_bodies import ResponsesBody
from bigmodel.server.http.tool_bodies import Tool
from tests.server.live import MODEL


@pytest.mark.parametrize("value", ["", "x" * (MAX_STOP_LENGTH + 1)])
def test_a_stop_string_is_neither_empty_nor_long(value: str) -> None:
    assert TypeAdapter(StopString).validate_python("x" * MAX_STOP_LENGTH)
    with pytest.raises(ValidationError):
        TypeAdapter(StopString).validate_python(value)


def test_the_assistant_may_have_refused() -> None:
    content = [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": "I cannot."}]
    refused = Message.model_validate({"role": "assistant", "content": content})
    assert refused.plain()["content"] == "No. I cannot."
    assert refused.plain(in_parts=True)["content"][1] == {"type": "text", "text": "I cannot."}
    with pytest.raises(ValidationError, match="refusals in a message of the role 'assistant' alone"):
        Message.model_validate({"role": "user", "content": content})


@pytest.mark.parametrize("path", ["chat", "responses", "messages"])
def test_a_total_probability_of_zero_is_taken(path: str) -> None:
    said = [{"role": "user", "content": "x"}]
    bodies = {"chat": ChatBody, "responses": ResponsesBody, "messages": MessagesBody}
    fields = {"model": "m", "top_p": 0, **({"input": "x"} if path == "responses" else {"messages": said})}
    fields |= {"max_tokens": 1} if path == "messages" else {}
    assert bodies[path].model_validate(fields).top_p == 0  # type: ignore[attr-defined]


LONE = "\ud800"  # half of a surrogate pair: JSON can write it, UTF-8 cannot
COMPLETION = {"model": MODEL, "prompt": "x", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def schema(inner: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": inner}}}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "a", **fields}]}


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"model": LONE}, "model"),
    ({"user": LONE}, "user"),
    ({"stop": LONE}, "stop"),
    ({"stop": ["a", LONE]}, "stop"),
    ({"logit_bias": {LONE: 1}}, "logit_bias"),
    ({"logit_bias": {"a" + LONE: 1}}, "logit_bias"),
    (schema({"const": LONE}), "response_format"),
    (schema({"type": "object", "properties": {LONE: {"type": "string"}}}), "response_format"),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str]] = [({"prompt": LONE}, "prompt"), ({"prompt": ["a", LONE]}, "prompt")]
OF_CHAT: list[tuple[dict[str, Any], str]] = [
    (message(content=LONE), "messages"),
    (message(content=[{"type": "text", "text": LONE}]), "messages"),
    (message(name=LONE), "messages"),
    (message(tool_calls=[{"id": "1", "function": {"arguments": LONE}}]), "messages"),
    (message(tool_calls=[{LONE: 1}]), "messages"),
    (message(tool_call_id=LONE), "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": LONE}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {LONE: 1}}}]}, "tools"),
    ({"chat_template_kwargs": {"a": [LONE]}}, "chat_template_kwargs"),
]
ELSEWHERE = [
    ("/tokenize", {"prompt": LONE}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONE}]}, "messages"),
    ("/tokenize", {"model": LONE, "prompt": "a"}, "model"),
    ("/detokenize", {"model": LONE, "tokens": [1]}, "model"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {**COMPLETION, "stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/completions", {**COMPLETION, "best_of": 2}, "best_of"),
        ("/v1/completions", {**COMPLETION, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 3}, "max_completion_tokens"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
    ],
)
def test_a_field_that_contradicts_another_is_named(url: str, path: str, fields: dict[str, Any], param: str) -> None:
    answer = post(url, path, json.dumps(fields))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert error["message"].startswith(f"'{param}': ")
    assert "Value error" not in error["message"]


def test_a_penalty_that_overflows_is_refused(url: str) -> None:
    answer = post(url, "/v1/completions", json.dumps({**COMPLETION, "repetition_penalty": 1e-300}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repetition_penalty")


def test_null_fields_count_as_absent(url: str) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        nulls = {"suffix": None, "functions": None, "store": None, "ignore_eos": None}
        assert post(url, path, json.dumps({**body, **nulls})).status_code == 200
    missing = post(url, "/v1/completions", json.dumps({**COMPLETION, "prompt": None}))
    assert (missing.status_code, missing.json()["error"]["code"]) == (422, "missing_required_parameter")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *(("/v1/completions", {**COMPLETION, **fields}, param) for fields, param in SHARED + OF_COMPLETIONS),
        *(("/v1/chat/completions", {**CHAT, **fields}, param) for fields, param in SHARED + OF_CHAT),
        *ELSEWHERE,
    ],
)
def test_a_lone_surrogate_is_refused_by_name(
    url: str, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    if stream and path.startswith("/v1"):
        body = {**body, "stream": True}
    answer = post(url, path, json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"].split(".")[0]) == (400, param), error
    assert "surrogate" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_lone_surrogate_in_a_name_is_refused(url: str, path: str) -> None:
    answer = post(url, path, json.dumps({LONE: 1}))
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["top-k", "", "a b", "str"])
def test_an_unknown_field_is_named_whatever_its_name(url: str, name: str) -> None:
    answer = post(url, "/v1/completions", json.dumps({**COMPLETION, name: 1}))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name or None)
    assert f"'{name}' is not supported" in error["message"]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60_000,
        '{"a":' * 20_000,
        '{"model": ' + "9" * 10_000 + "}",
        '{"model": 1e999999}',
        '"\\ud800"',
        "\ufeff{}",
    ],
)
def test_excessive_json_is_refused(url: str, text: str) -> None:
    answer = post(url, "/v1/completions", text)
    assert answer.status_code in (400, 413, 422)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"tools": None}, {"chat_template_kwargs": None}, {"response_format": None}])
def test_deeply_nested_objects_are_a_client_error(url: str, fields: dict[str, Any]) -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"items": deep}
    (name,) = fields
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    value = {"tools": [tool], "chat_template_kwargs": {"a": deep}, **schema(deep)}[name]
    answer = post(url, "/v1/chat/completions", json.dumps({**CHAT, name: value}))
    assert answer.status_code < 500, answer.text


def post(url: str, path: str, text: str) -> httpx.Response:
    return httpx.post(f"{url}{path}", content=text, headers={"content-type": "application/json"}, timeout=60)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Text, "ö\U0001f600"),
        (FreeObject, {"a": [{"b": "c"}, 1, None]}),
        (Number, -0.5),
        (TokenId, 0),
        (TokenId, 2**31 - 1),
    ],
)
def test_valid_values_are_unchanged(field: Any, value: Any) -> None:
    assert TypeAdapter(field).validate_python(value) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Text, "a\ud800"),
        (FreeObject, {"a": [{"b": "\ud800"}]}),
        (FreeObject, {"a": {"\ud800": 1}}),
        (Number, float("nan")),
        (Number, float("inf")),
        (TokenId, -1),
        (TokenId, 2**31),
    ],
)
def test_values_that_do_not_fit_are_refused(field: Any, value: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(field).validate_python(value)


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


def test_a_message_of_another_server_is_taken_as_it_answered() -> None:
    openais = {"annotations": [], "audio": None, "function_call": None, "refusal": None, "tool_calls": None}
    routers = {"reasoning": "Hm.", "reasoning_details": []}
    plain = {"role": "assistant", "content": "Yes."}
    assert Message.model_validate({**plain, **openais}).plain() == plain
    assert Message.model_validate({**plain, **routers}).plain() == {**plain, "reasoning_content": "Hm."}
    for wrong in ({"annotations": [{}]}, {"reasoning": "Hm.", "reasoning_content": "No."}):
        with pytest.raises(ValidationError):
            Message.model_validate({**plain, **wrong})


def test_hints_about_caching_change_nothing() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "Hi."}
    said = Message.model_validate({"role": "user", "content": [{**part, **hint}], **hint})
    assert said.plain() == {"role": "user", "content": "Hi."}
    with pytest.raises(ValidationError):
        Message.model_validate({"role": "user", "content": [{**part, "cache_control": {"type": "kept"}}]})
