"""Batches of texts are checked whole, tokenised beside the event loop, and wait for places."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bigmodel.server.engine.sampling.pooling import PoolingParams
from bigmodel.server.http import pooled_requests
from bigmodel.server.http.client_limits import LATER
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.internal_calls import post
from bigmodel.server.http.parsing import SMALL_BYTES
from bigmodel.server.http.pooled_requests import PooledText, PooledTexts
from tests.server.live import MODEL, engine_of, serving, tiny_app
from tests.server.serve_tiny import SlowOrBroken
from tests.server.tiny import tiny_model

PARAMS = PoolingParams("last")


class Runs:
    """Notes the sizes of what is run."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def __call__(self, size: int, function: Callable[[], Any], /) -> Any:
        self.sizes.append(size)
        return function()


def texts(given: list[str], run: Runs, made: list[int]) -> PooledTexts[str]:
    def tokenise(number: int, text: str) -> PooledText:
        made.append(number)
        return PooledText([len(text)], PARAMS)

    return PooledTexts(given, len, tokenise, run)


def test_few_texts_are_tokenised_once() -> None:
    run, made = Runs(), list[int]()
    batch = texts(["a", "bb", "ccc"], run, made)
    asyncio.run(batch.check())
    assert (batch.tokens, made, run.sizes) == (3, [0, 1, 2], [6 + 3 * pooled_requests._CALL])
    assert [text.tokens for text in asyncio.run(batch.part(1, 9))] == [[2], [3]]
    assert made == [0, 1, 2]


def test_many_are_tokenised_in_parts_and_again_when_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled_requests, "_CALL", 1)
    monkeypatch.setattr(pooled_requests, "_PART", 12)
    monkeypatch.setattr(pooled_requests, "_KEPT", 24)
    run, made = Runs(), list[int]()
    batch = texts(["12345"] * 9, run, made)
    asyncio.run(batch.check())
    assert run.sizes == [12, 12, 12, 12, 6]
    assert made == list(range(9))
    assert len(asyncio.run(batch.part(2, 6))) == 4
    assert made[9:] == [4, 5]
    assert run.sizes[-1] == 12


def test_many_short_texts_are_tokenised_beside_the_event_loop() -> None:
    run = Runs()
    asyncio.run(texts(["a"] * 2048, run, []).check())
    assert all(size > SMALL_BYTES for size in run.sizes[:-1])
    assert len(run.sizes) == 3


@pytest.mark.anyio
async def test_texts_of_a_batch_wait_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def submit(engine: Any, requests: list[Any]) -> None:
        seen.extend(request.priority for request in requests)
        raise APIError(429, "full")

    monkeypatch.setattr(pooled_requests, "submit_all", submit)
    app, body = tiny_app(), {"model": MODEL, "input": ["a", "b"]}
    engine_of(app).start()
    for scope in ({}, {LATER: 7}):
        assert (await post(app, "/v1/embeddings", json.dumps(body).encode(), **scope)).status == 429
    assert seen == [0, 0, 7, 7]
    engine_of(app).stop()


def ask(url: str, count: int) -> httpx.Response:
    return httpx.post(f"{url}/v1/embeddings", json={"model": MODEL, "input": ["a"] * count}, timeout=60)


@pytest.mark.parametrize(("count", "full", "status"), [(2, 1, 429), (9, 1, 429), (9, 2, 200)])
def test_the_first_texts_need_a_place_at_once_and_others_wait(
    url: str, monkeypatch: pytest.MonkeyPatch, count: int, full: int, status: int
) -> None:
    calls: list[int] = []
    submit = pooled_requests.submit_all

    def sometimes(*given: Any) -> None:
        calls.append(len(calls) + 1)
        if calls[-1] in (full, full + 1):
            raise APIError(429, "full")
        submit(*given)

    monkeypatch.setattr(pooled_requests, "submit_all", sometimes)
    assert ask(url, count).status_code == status
    assert len(calls) == (1 if status == 429 else 5)  # four at once, and twice no place


@pytest.mark.slow
def test_texts_that_find_no_place_in_time_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, calls = pooled_requests.submit_all, list[int]()

    def once(*given: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise APIError(429, "full")
        submit(*given)

    monkeypatch.setattr(pooled_requests, "submit_all", once)
    with serving(tiny_app(request_timeout=0.3)) as url:
        answer = ask(url, 9)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.slow
def test_what_a_client_that_left_has_asked_for_is_not_computed() -> None:
    model = tiny_model()
    model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, 0.02)
    app = tiny_app(model, engine={"prefix_cache": False})
    with serving(app) as url:
        core = engine_of(app).core
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/embeddings", json={"model": MODEL, "input": ["a"] * 2000}, timeout=0.3)
        steps = -1
        while not core.idle or core.steps != steps:  # a step is counted after its requests have ended
            steps = core.steps
            time.sleep(0.1)
        time.sleep(0.2)
        assert core.steps == steps < 100
        assert engine_of(app).unfinished == 0
