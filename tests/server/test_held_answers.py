"""A form of the answer beside tools that may be called or not, as agents send them, over all three interfaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

from tests.server.live import MODEL, serving
from tests.server.scripted import scripted_app
from tests.server.test_tool_calls import TIME, WEATHER

CALL = [
    *("<think>", "Which", " city?", "</think>", "\n\n"),
    *("<tool_call>", "\n", '{"name": "get_weather", ', '"arguments": {"city": "Paris", "days": 3}}', "\n</tool_call>"),
]
ANSWER = ['{"rain"', ": tr", "ue}"]
SCHEMA = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
USER = {"role": "user", "content": "the weather?"}
FUNCTIONS = [WEATHER["function"], TIME["function"]]
CALLED = ("get_weather", {"city": "Paris", "days": 3})


@pytest.fixture(scope="module")
def agent() -> Iterator[str]:
    app = scripted_app(CALL, template="<think></think><tool_call>", after_tools=ANSWER)
    with serving(app) as url:
        yield url


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}{path}", json={"model": MODEL, "temperature": 0, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chat(url: str, form: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": {"name": "rain", "schema": SCHEMA}}
    body = {
        "messages": [USER],
        "tools": [WEATHER, TIME],
        "response_format": form or schema,
        "max_tokens": 200,
        **fields,
    }
    return post(url, "/v1/chat/completions", **body)


def result(call_id: str) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": json.dumps(CALLED[1])}
    called = {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    return [USER, called, {"role": "tool", "tool_call_id": call_id, "content": "rain"}]


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, {"type": "json_object"}])
def test_a_chat_calls_and_then_answers_in_the_form(agent: str, form: dict[str, Any] | None) -> None:
    answer = chat(agent, form)
    choice = answer["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == CALLED
    assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("Which city?", "tool_calls")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    last = chat(agent, form, messages=result(call["id"]))
    assert json.loads(last["choices"][0]["message"]["content"]) == {"rain": True}
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.slow
def test_a_response_calls_and_then_answers_in_the_form(agent: str) -> None:
    fields: dict[str, Any] = {
        "tools": [{"type": "function", **function} for function in FUNCTIONS],
        "text": {"format": {"type": "json_schema", "name": "rain", "schema": SCHEMA}},
        "max_output_tokens": 200,
    }
    reasoning, call = post(agent, "/v1/responses", input="the weather?", **fields)["output"]
    assert (reasoning["type"], call["name"], json.loads(call["arguments"])) == ("reasoning", *CALLED)
    given = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    (message,) = post(agent, "/v1/responses", input=[USER, call, given], **fields)["output"]
    assert json.loads(message["content"][0]["text"]) == {"rain": True}


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_a_message_calls_and_then_answers_in_the_form(agent: str, name: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    fields: dict[str, Any] = {
        "tools": [{"name": each["name"], "input_schema": each.get("parameters", {})} for each in FUNCTIONS],
        name: form if name == "output_format" else {"format": form},
        "max_tokens": 200,
    }
    thinking, call = post(agent, "/v1/messages", messages=[USER], **fields)["content"]
    assert (thinking["type"], call["name"], call["input"]) == ("thinking", *CALLED)
    given = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
    told = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [given]}]
    (text,) = post(agent, "/v1/messages", messages=told, **fields)["content"]
    assert json.loads(text["text"]) == {"rain": True}


@pytest.mark.slow
def test_two_forms_of_a_message_disagree(agent: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    body = {"model": MODEL, "messages": [USER], "max_tokens": 9, "output_format": form}
    other = {"format": {**form, "schema": {"type": "object"}}}
    answer = httpx.post(f"{agent}/v1/messages", json={**body, "output_config": other})
    assert (answer.status_code, "output_format" in answer.text) == (400, True)


@pytest.mark.slow
def test_only_allowed_tools_are_called(agent: str) -> None:
    def chosen(name: str, mode: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    def calls(form: dict[str, Any], choice: dict[str, Any]) -> list[str]:
        message = chat(agent, form, tool_choice=choice)["choices"][0]["message"]
        return [call["function"]["name"] for call in message.get("tool_calls", ())]

    text = {"type": "text"}
    assert calls(text, chosen("get_weather", "auto")) == ["get_weather"]
    assert calls(text, chosen("get_time", "auto")) == []
    assert calls(text, chosen("get_time", "required"))[0] == "get_time"
    wrong = {"model": MODEL, "messages": [USER], "tools": [TIME], "tool_choice": chosen("get_weather", "auto")}
    error = httpx.post(f"{agent}/v1/chat/completions", json=wrong).json()["error"]
    assert (error["param"], "get_weather" in error["message"]) == ("tool_choice", True)


@pytest.mark.slow
def test_a_response_calls_allowed_tools_only(agent: str) -> None:
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    for name, called in (("get_weather", True), ("get_time", False)):
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": name}]}
        items = post(agent, "/v1/responses", input="hi", tools=tools, tool_choice=allowed, max_output_tokens=50)[
            "output"
        ]
        assert any(item["type"] == "function_call" for item in items) == called
