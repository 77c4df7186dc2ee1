"""POST /v1/completions: what the route itself decides. The answer's shape is tested with the answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.live import MODEL


def post(url: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "the cat", "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_a_completion_has_sixteen_tokens_unless_asked_otherwise(url: str) -> None:
    assert post(url).json()["usage"]["completion_tokens"] == 16
    assert post(url, max_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_choices_are_numbered_prompt_by_prompt(url: str) -> None:
    answer = post(url, prompt=["the cat", "in"], n=2, max_tokens=2, temperature=1).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == MODEL


def test_an_echo_begins_with_the_prompt_and_may_be_all_there_is(url: str) -> None:
    (choice,) = post(url, echo=True, max_tokens=0, logprobs=1).json()["choices"]
    assert choice["text"] == "the cat"
    assert len(choice["logprobs"]["tokens"]) == 5
    assert choice["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"model": "other"}, 404, "model"),
        ({"prompt": ["a"] * 9, "n": 64}, 400, "prompt"),
        ({"prompt": [10**6]}, 400, "prompt"),
    ],
)
def test_what_cannot_be_answered_is_refused(url: str, fields: dict[str, Any], status: int, param: str) -> None:
    answer = post(url, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_stream_is_of_events_and_ends_with_done(url: str) -> None:
    answer = post(url, stream=True, max_tokens=2)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
