"""Fields that clients of vLLM's server send: tokens that end a text, fewest and allowed ones, reasoning left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.http.asking import CHAT, COMPLETIONS, post, refusal
from tests.server.live import serving
from tests.server.oracle import generate
from tests.server.scripted import scripted_app
from tests.server.test_tool_calls import HERMES
from tests.server.tiny import make_request, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def thinker() -> Iterator[str]:
    with serving(scripted_app(HERMES, template="<think></think><tool_call>")) as url:
        yield url


@pytest.fixture(scope="module")
def greedy() -> list[int]:
    """The tokens after "the cat", by a loop of its own."""
    params = make_request("x", max_tokens=12, temperature=0, ignore_eos=True).params
    return generate(tiny_model(), tiny_tokenizer(), tiny_tokenizer().encode("the cat"), params)


def text_of(tokens: list[int]) -> str:
    text: str = tiny_tokenizer().decode(tokens)
    return text


def ask(url: str, **fields: Any) -> tuple[str, str, int]:
    """Text, reason to end, and number of tokens."""
    answer = post(url, COMPLETIONS, **{"max_tokens": 12, **fields}).json()
    choice = answer["choices"][0]
    return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]


def test_a_stop_token_ends_the_text_and_is_not_shown(url: str, greedy: list[int]) -> None:
    at = next(index for index in range(4, 12) if greedy[index] not in greedy[:index])
    assert ask(url, stop_token_ids=[greedy[at]]) == (text_of(greedy[:at]), "stop", at + 1)


def test_no_token_ends_the_text_before_the_fewest(url: str, greedy: list[int]) -> None:
    assert ask(url, stop_token_ids=greedy)[2] == 1
    text, reason, count = ask(url, stop_token_ids=greedy, min_tokens=6)
    assert (reason, count >= 7) in (("stop", True), ("length", True))
    assert not {*tiny_tokenizer().encode(text)} & {*greedy}


@pytest.mark.slow
def test_only_allowed_tokens_are_drawn(url: str) -> None:
    allowed = tiny_tokenizer().encode("xyz")
    for temperature in (0, 1):
        text, _, count = ask(url, allowed_token_ids=allowed, temperature=temperature, seed=1)
        assert (len(text), set(text) <= set("xyz"), count) == (12, True, 12)


@pytest.mark.slow
def test_reasoning_may_be_left_out(thinker: str) -> None:
    for stream in (False, True):
        shown, hidden = (
            post(thinker, CHAT, ignore_eos=False, stream=stream, include_reasoning=each).text for each in (True, False)
        )
        assert ("reasoning_content" in shown, "reasoning_content" in hidden) == (True, False)
        assert "I look" in hidden


def test_reasoning_ends_at_its_budget(thinker: str) -> None:
    message = post(thinker, CHAT, ignore_eos=False, thinking_token_budget=1).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Which"


def test_labels_change_nothing(url: str) -> None:
    labels = {"metadata": {"a": "b"}, "safety_identifier": "c", "prompt_cache_key": "d", "store": False}
    plain, labelled = (post(url, CHAT, max_tokens=4, **fields).json()["choices"] for fields in ({}, labels))
    assert plain == labelled


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [1], "min_tokens": 1}, "min_tokens"),
        (COMPLETIONS, {"min_tokens": -1}, "min_tokens"),
        (CHAT, {"documents": [{"text": "a"}]}, "documents"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHAT, {"store": True}, "store"),
    ],
)
def test_what_cannot_be_is_refused_by_name(url: str, path: str, fields: dict[str, Any], param: str) -> None:
    assert refusal(url, path, **fields) == (400, param)


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_may_come_with_every_chunk(url: str, path: str) -> None:
    for continuous in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        lines = post(url, path, max_tokens=6, stream=True, stream_options=options).text.split("\n\n")
        *chunks, last = (json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line)
        counted = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert last["usage"]["completion_tokens"] == 6
        if continuous:
            assert counted == sorted(counted)
            assert chunks[-1]["usage"].items() <= last["usage"].items()
        else:
            assert set(counted) == {None}
    lines = post(url, path, max_tokens=6, stream=True, stream_options={"continuous_usage_stats": True}).text
    assert '"usage"' not in lines


@pytest.mark.slow
def test_a_message_may_have_a_type_that_says_nothing(url: str) -> None:
    message = {"role": "user", "content": "hi"}
    both = message, {**message, "type": "text"}
    plain, typed = (post(url, CHAT, max_tokens=4, messages=[each]).json()["choices"] for each in both)
    assert plain == typed
    assert refusal(url, CHAT, messages=[{**message, "type": "image"}])[1] == "messages.0.type"
