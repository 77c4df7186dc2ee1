"""From what a client sent to what the engine is given."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request as HTTPRequest

from bigmodel.server import Settings
from bigmodel.server.engine import Engine, Failed, SamplingParams
from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.client_limits import KEY
from bigmodel.server.http.engine_requests import check_number, make_request, sampling_params, submit_all, token_limit
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.state import ServerState
from bigmodel.server.http.text_bodies import CompletionBody
from bigmodel.server.text.codec import TextCodec
from tests.server.tiny import Collector, tiny_engine, tiny_tokenizer
from tests.server.tiny import make_request as engine_request

CODEC = TextCodec(tiny_tokenizer())


def completion(prompt: Any = "x", **fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": "tiny", "prompt": prompt, **fields})


@pytest.mark.parametrize(
    ("asked", "default", "prompt", "limit"),
    [
        (5, None, 10, 5),
        (None, None, 10, 22),
        (None, 16, 10, 16),
        (None, 16, 30, 2),
        (22, None, 10, 22),
        (0, None, 32, 0),
    ],
)
def test_max_tokens_default_to_the_rest_of_the_context(
    asked: int | None, default: int | None, prompt: int, limit: int
) -> None:
    assert token_limit(("max_tokens", asked), default, prompt, 32) == limit


@pytest.mark.parametrize(("asked", "prompt", "long"), [(23, 10, True), (None, 32, True), (0, 33, True), (5, 0, False)])
def test_values_that_do_not_fit_are_refused(asked: int | None, prompt: int, long: bool) -> None:
    with pytest.raises(APIError) as refused:
        token_limit(("max_tokens", asked), None, prompt, 32)
    assert refused.value.status == 400
    assert (refused.value.code == "context_length_exceeded") == long
    assert ("prompt is too long" in refused.value.message) == long


def test_the_field_that_exceeds_the_context_is_named() -> None:
    messages = [{"role": "user", "content": "x"}]
    for name in ("max_tokens", "max_completion_tokens"):
        body = ChatBody.model_validate({"model": "tiny", "messages": messages, name: 100})
        with pytest.raises(APIError, match=f"{name}=100") as refused:
            token_limit(body.limit, None, 10, 32)
        assert refused.value.param == name


def test_fields_not_given_take_openai_s_defaults() -> None:
    params = sampling_params(completion(), CODEC, max_tokens=3, logprobs=None)
    assert params == SamplingParams(max_tokens=3)


def test_every_field_given_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "presence_penalty": 1.0},
        **{"frequency_penalty": -1.0, "repetition_penalty": 1.2, "ignore_eos": True},
    }
    body = completion(stop=["a"], logit_bias={"5": 2.0}, **fields)
    params = sampling_params(body, CODEC, max_tokens=3, logprobs=2, prompt_logprobs=True)
    wanted = SamplingParams(3, stop=("a",), logit_bias={5: 2.0}, logprobs=2, prompt_logprobs=True, **fields)
    assert params == wanted


@pytest.mark.parametrize("key", ["cat", "-1", "1.0", "", "²", "9" * 12, str(CODEC.vocabulary_size)])
def test_a_bias_for_an_unknown_token_is_refused(key: str) -> None:
    with pytest.raises(APIError, match="no token id"):
        sampling_params(completion(logit_bias={key: 1.0}), CODEC, max_tokens=1, logprobs=None)


def received(key: str | None = None, **settings: Any) -> HTTPRequest:
    """A request to a server with these settings, allowed by a key."""
    app = SimpleNamespace(state=SimpleNamespace(server=ServerState(Settings("tiny", **settings))))
    return HTTPRequest({"type": "http", "app": app, "client": ("10.0.0.1", 80)} | ({} if key is None else {KEY: key}))


def test_a_request_is_its_keys_and_has_its_priority() -> None:
    request = make_request(received("alice"), completion(priority=-3), [1], SamplingParams(1), Collector())
    assert (request.client, request.key, request.priority) == ("alice", "alice", -3)
    request = make_request(received(), completion(), [1], SamplingParams(1), Collector())
    assert (request.client, request.key, request.priority) == ("10.0.0.1", "", 0)


@pytest.mark.parametrize(("asked", "server", "seconds"), [(None, None, None), (5, None, 5), (9, 3, 3), (None, 3, 3)])
def test_the_shorter_deadline_holds(asked: float | None, server: float | None, seconds: float | None) -> None:
    before = time.monotonic()
    request = make_request(
        received(request_timeout=server), completion(timeout=asked), [1], SamplingParams(1), Collector()
    )
    if seconds is None:
        assert request.deadline is None
    else:
        assert request.deadline is not None
        assert before + seconds <= request.deadline <= time.monotonic() + seconds


@pytest.fixture
def engine() -> Any:
    made = tiny_engine(max_sequences=1, max_queue=1)
    yield made
    made.stop()


def test_more_sequences_than_the_queue_holds_are_refused(engine: Engine) -> None:
    check_number(engine, 1, 2)
    for prompts, choices, param in ((1, 3, "n"), (3, 1, "prompt")):
        with pytest.raises(APIError, match="at most 2 at once") as refused:
            check_number(engine, prompts, choices)
        assert (refused.value.status, refused.value.param) == (400, param)


def test_requests_are_submitted_all_or_none(engine: Engine) -> None:
    requests = [engine_request("the cat", max_tokens=500, ignore_eos=True) for _ in range(3)]
    first, second = (request.sink for request in requests[:2])
    with pytest.raises(APIError) as refused:
        submit_all(engine, requests)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    for taken_back in (first, second):
        assert isinstance(taken_back, Collector)
        ended = taken_back.wait()
        assert isinstance(ended, Failed)
        assert ended.kind == "cancelled"
    assert engine.unfinished == 0


def test_a_stopped_engine_refuses_requests(engine: Engine) -> None:
    engine.stop()
    with pytest.raises(APIError) as refused:
        submit_all(engine, [engine_request("x")])
    assert (refused.value.status, refused.value.code) == (503, "engine_stopped")
