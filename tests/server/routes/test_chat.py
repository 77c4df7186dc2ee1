"""POST /v1/chat/completions: what the route itself decides. The answer's shape is tested with the answers."""

from __future__ import annotations

import pytest

from tests.server.routes.asking import CHAT, post, refusal


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_either_name_limits_the_tokens(url: str, name: str) -> None:
    answer = post(url, CHAT, **{name: 3}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["id"].startswith("chatcmpl-")


def test_each_choice_is_a_message_of_its_own(url: str) -> None:
    choices = post(url, CHAT, n=2, max_tokens=2).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert {choice["message"]["role"] for choice in choices} == {"assistant"}


def test_logprobs_come_only_where_they_are_asked_for(url: str) -> None:
    asked, plain = (
        post(url, CHAT, max_tokens=2, **more).json()["choices"][0]["logprobs"]
        for more in ({"logprobs": True, "top_logprobs": 2}, {})
    )
    assert plain is None
    assert [len(token["top_logprobs"]) for token in asked["content"]] == [2, 2]


def test_a_conversation_longer_than_the_context_is_refused(url: str) -> None:
    long = [{"role": "user", "content": "a" * 2000}]
    assert refusal(url, CHAT, messages=long) == (413, "messages")
