"""The calls of Open WebUI, which is a program, not a package: its list of models, chats, tasks and vectors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.clients.asked import ANSWER, SAID, THOUGHT
from tests.server.live import MODEL
from tests.server.test_tool_calls import BOTH, TOOLS

HEADERS = {
    "Authorization": "Bearer none",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-User-Id": "4f1c",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "8a2b",
}
PARAMETERS = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "max_tokens": 8,
    "seed": 1,
    "stop": ["<end>"],
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 2},
}


@pytest.fixture
def ui(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{url}/v1", headers=HEADERS, timeout=60) as client:
        yield client


def deltas(answer: httpx.Response) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The deltas of a stream, read line by line, and its usage."""
    found, usage = [], {}
    lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        data = json.loads(line.removeprefix("data: "))
        usage = data.get("usage") or usage
        found += [choice["delta"] for choice in data["choices"]]
    return found, usage


def merged(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a stream, put together as the program does."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta["index"] not in calls:
            calls[delta["index"]] = delta
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return list(calls.values())


@pytest.mark.slow
def test_the_list_of_models(ui: httpx.Client) -> None:
    answer = ui.get("/models")
    (model,) = answer.json()["data"]
    assert (answer.json()["object"], model["id"], model["object"]) == ("list", MODEL, "model")


def test_a_streamed_chat(ui: httpx.Client) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ]
    body = {"model": MODEL, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    for parameters in ({"max_tokens": 8, "temperature": 0}, PARAMETERS):  # sampled, the end may come first
        with ui.stream("POST", "/chat/completions", json={**body, **parameters}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            found, usage = deltas(answer)
        assert "".join(delta.get("content", "") for delta in found)
        assert usage["completion_tokens"] <= 8


@pytest.mark.slow
def test_a_task_such_as_a_title(ui: httpx.Client) -> None:
    prompt = '### Task:\nWrite a title of 3 to 5 words.\n### Output:\nJSON: { "title": "..." }\n### Chat:\nhi'
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": False}
    answer = ui.post("/chat/completions", json={**body, "max_completion_tokens": 50})
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


def test_a_task_may_ask_for_no_more_tokens_than_the_context_has(ui: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 100}], "max_completion_tokens": 1000}
    error = ui.post("/chat/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_completion_tokens")


@pytest.mark.slow
def test_functions_are_called_and_their_results_sent_back(hermes: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    with httpx.Client(base_url=f"{hermes}/v1", headers=HEADERS, timeout=60) as ui:
        body = {"model": MODEL, "tools": TOOLS, "stream": True, "temperature": 0}
        with ui.stream("POST", "/chat/completions", json={**body, "messages": messages}) as answer:
            found, _ = deltas(answer)
        calls = merged(call for delta in found for call in delta.get("tool_calls", ()))
        assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == BOTH
        assert "".join(delta.get("content") or "" for delta in found) == SAID
        assert "".join(delta.get("reasoning_content") or "" for delta in found) == THOUGHT
        messages.append({"role": "assistant", "content": SAID, "tool_calls": calls})  # with their index
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
        with ui.stream("POST", "/chat/completions", json={**body, "messages": messages}) as answer:
            found, _ = deltas(answer)
    assert "".join(delta.get("content") or "" for delta in found) == ANSWER


def test_vectors_of_a_knowledge_base(ui: httpx.Client) -> None:
    for given, count in ((["a", "b"], 2), ("a", 1)):
        answer = ui.post("/embeddings", json={"input": given, "model": MODEL})
        assert [len(vector["embedding"]) for vector in answer.json()["data"]] == [64] * count
