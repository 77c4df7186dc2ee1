"""Hostile requests: a few hundred drawn by seed, against a running process, and any value in any field."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from bigmodel.benchmarks.hostile import ALLOWED, Attack, send
from bigmodel.benchmarks.hostile_requests import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    KINDS,
    MESSAGES,
    RERANK,
    RESPONSES,
    TOKENIZE,
    draw,
    largest_bodies,
    post,
)
from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.messages_bodies import CountTokensBody, MessagesBody
from bigmodel.server.http.pooled_bodies import EmbeddingsBody, RerankBody
from bigmodel.server.http.responses_bodies import ResponsesBody
from bigmodel.server.http.text_bodies import CompletionBody
from bigmodel.server.http.tokenize_bodies import DetokenizeBody, TokenizeBody
from tests.cli.test_serve_process import serving
from tests.server.encoders import cross_encoder, encoder_app
from tests.server.live import serving as serving_app
from tests.server.tiny import tiny_model, tiny_tokenizer


@pytest.mark.slow
def test_hostile_requests_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with serving(folder, tmp_path / "log", "--request-timeout", "30", "--log-level", "warning") as served:
        port = int(served.url.rpartition(":")[2])
        before = served.complete(max_tokens=8, temperature=0).json()["choices"]
        statuses: Counter[int] = Counter()
        rng = random.Random(0)
        left = iter(range(120))

        async def client() -> None:
            for _ in left:
                attack = draw(rng, "tiny", largest=100_000)
                status, body = await send(port, attack)
                statuses[status] += 1
                assert status < 500 or status in ALLOWED, (attack.kind, attack.raw[:1000], body)
                assert status < 400 or len(body) <= 1024, attack.kind

        async def crowd() -> None:
            await asyncio.gather(*(client() for _ in range(8)))

        asyncio.run(crowd())
        assert served.status("health") == 200
        assert served.complete(max_tokens=8, temperature=0).json()["choices"] == before
        assert served.process.poll() is None
        assert "Traceback" not in served.said()
    assert len(statuses) > 3, statuses


HI = [{"role": "user", "content": "the"}]
FEW = {"max_tokens": 2, "temperature": 0}
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    COMPLETIONS: (CompletionBody, {"prompt": [1, 2, 3], **FEW}),
    CHAT: (ChatBody, {"messages": HI, **FEW}),
    TOKENIZE: (TokenizeBody, {"messages": HI}),
    DETOKENIZE: (DetokenizeBody, {"tokens": [1, 2, 3]}),
    MESSAGES: (MessagesBody, {"messages": HI, **FEW}),
    RESPONSES: (ResponsesBody, {"input": "the", "max_output_tokens": 2, "temperature": 0}),
    EMBEDDINGS: (EmbeddingsBody, {"input": ["the", "cat"]}),
    RERANK: (RerankBody, {"documents": ["the", "cat"], "query": "a"}),
    f"{MESSAGES}/count_tokens": (CountTokensBody, {"system": "the", "messages": HI}),
}
"""Of each route its body, and fields of a good request; the first of them is the largest in hostile ones."""


@pytest.mark.parametrize("path", [path for path in ROUTES if path != CHAT])
@pytest.mark.parametrize("name", largest_bodies("tiny", 100))
def test_large_bodies_of_every_sort_are_answered_in_few_bytes(path: str, name: str, url: str) -> None:
    port = int(url.rpartition(":")[2])
    body = largest_bodies("tiny", 150_000, next(iter(ROUTES[path][1])))[name]
    status, answer = asyncio.run(send(port, Attack(name, post(path, body))))
    assert status in (400, 404, 413, 422), answer
    assert len(answer) <= 1024


def test_every_kind_is_drawn_and_a_seed_draws_the_same() -> None:
    drawn = [[draw(random.Random(seed), "tiny", largest=1000) for seed in range(300)] for _ in range(2)]
    assert {attack.kind for attack in drawn[0]} == set(KINDS)
    assert drawn[0] == drawn[1]


NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400])
TEXTS = st.text(st.characters(), max_size=20) | st.sampled_from(
    ["\ud800", "\x00", "a" * 5000, "{{ 1 }}", "((((", "</s>"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
"""Values of JSON, and what some parsers take for it: numbers without an end, half a character."""


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a request that would be good if not for some of its fields."""
    path = draw(st.sampled_from(list(ROUTES)))
    body_type, good = ROUTES[path]
    fields = st.sampled_from([*body_type.model_fields, "unknown"])
    return path, {"model": "tiny"} | good | draw(st.dictionaries(fields, ANYTHING, min_size=1, max_size=3))


@pytest.fixture(scope="module")
def reranker() -> Iterator[str]:
    with serving_app(encoder_app(cross_encoder())) as address:
        yield address


@pytest.mark.parametrize("path", [RERANK, EMBEDDINGS])
@pytest.mark.parametrize("name", largest_bodies("tiny", 100))
def test_large_bodies_to_a_model_that_scores(path: str, name: str, reranker: str) -> None:
    port = int(reranker.rpartition(":")[2])
    body = largest_bodies("tiny", 1_500_000, next(iter(ROUTES[path][1])))[name]
    status, answer = asyncio.run(send(port, Attack(name, post(path, body))))
    assert status in (400, 404, 413, 422), answer
    assert len(answer) <= 1024


@st.composite
def rankings(draw: st.DrawFn) -> dict[str, Any]:
    """A request to rank documents that would be good if not for some of its fields."""
    fields = st.sampled_from([*RerankBody.model_fields, "unknown"])
    good = {"model": "tiny", "documents": ["the", {"text": "cat"}], "query": "a"}
    return good | draw(st.dictionaries(fields, ANYTHING, min_size=1, max_size=3))


@pytest.mark.slow
@given(body=rankings())
def test_any_value_in_any_field_of_a_ranking(reranker: str, body: dict[str, Any]) -> None:
    port = int(reranker.rpartition(":")[2])
    status, answer = asyncio.run(send(port, Attack("fields", post(RERANK, json.dumps(body).encode()))))
    assert status == 200 or (400 <= status < 500 and len(answer) <= 1024), (status, answer)


@pytest.mark.slow
@given(request_=bodies())
def test_any_value_in_any_field_is_answered_in_few_bytes(url: str, request_: tuple[str, dict[str, Any]]) -> None:
    path, body = request_
    port = int(url.rpartition(":")[2])
    status, answer = asyncio.run(send(port, Attack("fields", post(path, json.dumps(body).encode()))))
    assert status == 200 or (400 <= status < 500 and len(answer) <= 1024) or status in ALLOWED, (status, answer)
    good = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}).encode()
    status, answer = asyncio.run(send(port, Attack("good", post(COMPLETIONS, good))))
    assert status == 200, answer
