"""POST /v1/chat/completions: what the route itself decides. The answer's shape is tested with the answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.live import MODEL


def post(url: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_either_name_limits_the_tokens(url: str, name: str) -> None:
    answer = post(url, **{name: 3}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["id"].startswith("chatcmpl-")


def test_each_choice_is_a_message_of_its_own(url: str) -> None:
    choices = post(url, n=2, max_tokens=2).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert {choice["message"]["role"] for choice in choices} == {"assistant"}


def test_logprobs_come_only_where_they_are_asked_for(url: str) -> None:
    asked, plain = (
        post(url, max_tokens=2, **more).json()["choices"][0]["logprobs"]
        for more in ({"logprobs": True, "top_logprobs": 2}, {})
    )
    assert plain is None
    assert [len(token["top_logprobs"]) for token in asked["content"]] == [2, 2]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"model": "other"}, 404, "model"),
        ({"messages": [{"role": "user", "content": "a" * 2000}]}, 413, "messages"),
    ],
)
def test_what_cannot_be_answered_is_refused(url: str, fields: dict[str, Any], status: int, param: str) -> None:
    answer = post(url, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_stream_is_of_events_and_ends_with_done(url: str) -> None:
    answer = post(url, stream=True, max_tokens=2)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
