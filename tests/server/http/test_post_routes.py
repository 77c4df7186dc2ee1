"""POST routes: what the routes themselves decide. The form of answers is tested with the answers."""

from __future__ import annotations

import pytest

from tests.server.http.asking import CHAT, COMPLETIONS, post, refusal
from tests.server.live import MODEL


def test_a_completion_has_sixteen_tokens_by_default(url: str) -> None:
    assert post(url, COMPLETIONS).json()["usage"]["completion_tokens"] == 16
    assert post(url, COMPLETIONS, max_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_choices_are_numbered_prompt_by_prompt(url: str) -> None:
    answer = post(url, COMPLETIONS, prompt=["the cat", "in"], n=2, max_tokens=2, temperature=1).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == MODEL


def test_an_echo_begins_with_the_prompt_and_may_be_all_there_is(url: str) -> None:
    (choice,) = post(url, COMPLETIONS, echo=True, max_tokens=0, logprobs=1).json()["choices"]
    assert choice["text"] == "the cat"
    assert len(choice["logprobs"]["tokens"]) == 5
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_too_many_prompts_and_unknown_tokens_are_refused(url: str) -> None:
    assert refusal(url, COMPLETIONS, prompt=["a"] * 9, n=64) == (400, "prompt")
    assert refusal(url, COMPLETIONS, prompt=[10**6]) == (400, "prompt")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens_are_accepted(url: str, name: str) -> None:
    answer = post(url, CHAT, **{name: 3}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["id"].startswith("chatcmpl-")


def test_each_choice_is_a_separate_message(url: str) -> None:
    choices = post(url, CHAT, n=2, max_tokens=2).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert {choice["message"]["role"] for choice in choices} == {"assistant"}


def test_logprobs_are_returned_only_on_request(url: str) -> None:
    asked, plain = (
        post(url, CHAT, max_tokens=2, **more).json()["choices"][0]["logprobs"]
        for more in ({"logprobs": True, "top_logprobs": 2}, {})
    )
    assert plain is None
    assert [len(token["top_logprobs"]) for token in asked["content"]] == [2, 2]


def test_a_conversation_longer_than_the_context_is_refused(url: str) -> None:
    long = [{"role": "user", "content": "a" * 2000}]
    assert refusal(url, CHAT, messages=long) == (413, "messages")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_zero_tokens_and_another_model_are_refused(url: str, path: str) -> None:
    assert refusal(url, path, max_tokens=0) == (400, "max_tokens")
    assert refusal(url, path, model="other") == (404, "model")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_has_events_and_ends_with_done(url: str, path: str) -> None:
    answer = post(url, path, stream=True, max_tokens=2)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
