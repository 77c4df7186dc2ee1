"""POST /v1/completions: prompts in all their shapes, and what the route decides. The form of answers is tested with the
answers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bigmodel.server.http.completions_routes import completion_prompts
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.text_bodies import CompletionBody
from bigmodel.server.text.codec import TextCodec
from tests.server.http.asking import CHAT, COMPLETIONS, post, refusal
from tests.server.live import MODEL
from tests.server.tiny import tiny_tokenizer

CODEC = TextCodec(tiny_tokenizer())


def completion(prompt: Any = "x", **fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": "tiny", "prompt": prompt, **fields})


@pytest.mark.slow
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


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_zero_tokens_and_another_model_are_refused(url: str, path: str) -> None:
    assert refusal(url, path, max_tokens=0) == (400, "max_tokens")
    assert refusal(url, path, model="other") == (404, "model")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_has_events_and_ends_with_done(url: str, path: str) -> None:
    answer = post(url, path, stream=True, max_tokens=2)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("the", [CODEC.encode("the")]),
        (["the", "cat"], [CODEC.encode("the"), CODEC.encode("cat")]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("cat " * 2000, [CODEC.encode("cat " * 2000)]),  # long enough to be read in another thread
    ],
)
async def test_prompts_in_each_of_their_shapes(prompt: Any, tokens: list[list[int]]) -> None:
    assert await completion_prompts(completion(prompt), CODEC, 9000) == tokens


@pytest.mark.anyio
async def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(APIError, match="not in the vocabulary"):
        await completion_prompts(completion([CODEC.vocabulary_size]), CODEC, 9000)


@pytest.mark.anyio
@pytest.mark.parametrize("prompt", ["cat " * 20_000, [1] * 80])
async def test_a_prompt_beyond_the_context_is_refused_without_tokenising_all_of_it(
    prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = CODEC.tokenizer.encode
    monkeypatch.setattr(
        CODEC.tokenizer, "encode", lambda text, **more: lengths.append(len(text)) or encode(text, **more)
    )
    with pytest.raises(APIError, match="at most 40 fit") as refused:
        await completion_prompts(completion(prompt), CODEC, 40)
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert sum(lengths) < 1000


@pytest.mark.anyio
@pytest.mark.parametrize(("number", "beside"), [(2, False), (10, True)])
async def test_many_short_prompts_are_tokenised_as_one_long_one(
    number: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[bool] = set()
    encode = CODEC.tokenizer.encode

    def noted(text: str, **more: Any) -> Any:
        threads.add(threading.current_thread() is not threading.main_thread())
        return encode(text, **more)

    monkeypatch.setattr(CODEC.tokenizer, "encode", noted)
    await completion_prompts(completion(["cat " * 500] * number), CODEC, 9000)
    assert threads == {beside}
