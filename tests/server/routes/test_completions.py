"""POST /v1/completions: what the route itself decides. The answer's shape is tested with the answers."""

from __future__ import annotations

from tests.server.live import MODEL
from tests.server.routes.asking import COMPLETIONS, post, refusal


def test_a_completion_has_sixteen_tokens_unless_asked_otherwise(url: str) -> None:
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


def test_too_many_prompts_and_tokens_that_are_none_are_refused(url: str) -> None:
    assert refusal(url, COMPLETIONS, prompt=["a"] * 9, n=64) == (400, "prompt")
    assert refusal(url, COMPLETIONS, prompt=[10**6]) == (400, "prompt")
