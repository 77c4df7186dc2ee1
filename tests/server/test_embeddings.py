"""Embeddings by the official client are what the model's own forward gives, pooled and of length 1."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.server.encoders import LONGEST, WIDTH, cross_encoder, encoder, encoder_app, pair_tokenizer, states
from tests.server.live import MODEL, engine_of, serving, tiny_app
from tests.server.tiny import tiny_model, tiny_tokenizer

TEXTS = ["the cat", "in", "then in the end " * 4, "a"]


@pytest.fixture(scope="module")
def encoder_url() -> Iterator[str]:
    with serving(encoder_app(encoder())) as url:
        yield url


@pytest.fixture(params=["decoder", "encoder"])
def served(request: pytest.FixtureRequest) -> tuple[str, Any, Any, Any]:
    """Address, model, tokenizer, and how states become a vector."""
    if request.param == "decoder":
        return request.getfixturevalue("url"), tiny_model(), tiny_tokenizer(), lambda rows: rows[-1]
    return request.getfixturevalue("encoder_url"), encoder(), pair_tokenizer(), lambda rows: rows.mean(dim=0)


def ask(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/embeddings", json={"model": MODEL, "input": "the cat", **fields}, timeout=60)


def vectors(answer: httpx.Response) -> torch.Tensor:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return torch.tensor([entry["embedding"] for entry in data])


def test_values_are_those_of_the_models_own_forward(served: Any) -> None:
    url, model, tokenizer, pool = served
    own = torch.stack([pool(states(model, tokenizer.encode(text))) for text in TEXTS])
    own = own / own.norm(dim=1, keepdim=True)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS)  # the client asks for base64
        floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    torch.testing.assert_close(torch.tensor([entry.embedding for entry in answer.data]), own, rtol=1e-4, atol=1e-5)
    assert [entry.embedding for entry in floats.data] == [entry.embedding for entry in answer.data]
    count = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert (answer.object, answer.model, answer.usage.prompt_tokens) == ("list", MODEL, count)


def test_tokens_are_taken_as_they_are(served: Any) -> None:
    url, _, tokenizer, _ = served
    tokens = [tokenizer.encode(text) for text in TEXTS]
    torch.testing.assert_close(vectors(ask(url, input=tokens)), vectors(ask(url, input=TEXTS)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(vectors(ask(url, input=tokens[0]))[0], vectors(ask(url))[0], rtol=1e-4, atol=1e-5)


def test_dimensions_are_the_first_values_of_length_one(served: Any) -> None:
    url = served[0]
    whole = vectors(ask(url, normalize=False))[0]
    kept = vectors(ask(url, dimensions=10))[0]
    torch.testing.assert_close(kept, whole[:10] / whole[:10].norm())
    assert len(whole) == WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("served", ["encoder", pytest.param("decoder", marks=pytest.mark.long)], indirect=True)
def test_more_inputs_than_run_at_once(served: Any) -> None:
    url = served[0]
    many = [f"{number} the" for number in range(150)]
    found = vectors(ask(url, input=many))
    assert found.shape == (150, WIDTH)
    torch.testing.assert_close(found[140:141], vectors(ask(url, input=many[140])), rtol=1e-4, atol=1e-5)


def test_a_long_text_is_refused_or_shortened(served: Any) -> None:
    url = served[0]
    long = "a" * 2000
    answer = ask(url, input=["a", long])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.1")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert ask(url, input=["a", long], truncate_prompt_tokens=-1).status_code == 200
    five = ask(url, input=long, truncate_prompt_tokens=5)
    assert five.json()["usage"]["prompt_tokens"] == 5


def test_shortened_texts_keep_their_special_tokens(encoder_url: str) -> None:
    answer = ask(encoder_url, input="a" * (3 * LONGEST), truncate_prompt_tokens=-1)
    whole = [*pair_tokenizer().encode("a" * (LONGEST - 1))]
    assert len(whole) == answer.json()["usage"]["prompt_tokens"] == LONGEST
    torch.testing.assert_close(vectors(answer), vectors(ask(encoder_url, input=whole)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": [[]]}, 400, "input.0"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": [10**6]}, 400, "input"),
        ({"input": 5}, 422, "input"),
        ({"dimensions": 0}, 400, "dimensions"),
        ({"dimensions": 65}, 400, "dimensions"),
        ({"encoding_format": "int8"}, 400, "encoding_format"),
        ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ({"model": "other"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
    ],
)
def test_what_cannot_be_is_refused_by_name(served: Any, fields: dict[str, Any], status: int, param: str) -> None:
    answer = ask(served[0], **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.slow
@pytest.mark.parametrize("made", [lambda: tiny_app(), lambda: encoder_app(encoder())], ids=["decoder", "encoder"])
def test_more_dimensions_than_there_are_are_refused_before_anything_is_computed(made: Callable[[], Any]) -> None:
    app = made()
    with serving(app) as url:
        steps = engine_of(app).core.steps
        answer = ask(url, dimensions=WIDTH + 1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")
        assert engine_of(app).core.steps == steps


@pytest.mark.long
@pytest.mark.slow
def test_while_texts_are_computed_they_are_in_memory_once() -> None:
    """The body that they were parsed of is not kept beside them, nor the tokens of all."""
    model = encoder()
    app = encoder_app(model)
    texts = [chr(65 + number % 26) * 12_000 for number in range(160)]
    body = json.dumps({"model": MODEL, "input": texts, "truncate_prompt_tokens": 4}).encode()
    held: list[int] = []

    def look(*_: Any) -> None:
        gc.collect()  # tests look for garbage less often than servers do
        held.append(tracemalloc.get_traced_memory()[0])

    model.register_forward_pre_hook(look)
    with serving(app) as url:
        ask(url)
        tracemalloc.start()
        try:
            held.clear()
            answer = httpx.post(
                f"{url}/v1/embeddings", content=body, headers={"content-type": "application/json"}, timeout=60
            )
        finally:
            tracemalloc.stop()
    assert vectors(answer).shape == (160, WIDTH)
    assert len(held) >= 40
    assert max(held) < 1.5 * len(body)


@pytest.mark.slow
def test_streams_go_on_beside_embeddings(url: str) -> None:
    """A text that is generated has the same tokens when vectors are computed in the same steps."""
    asked = {"model": MODEL, "prompt": "the cat", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    alone = httpx.post(f"{url}/v1/completions", json=asked).json()["choices"][0]["text"]
    with httpx.stream("POST", f"{url}/v1/completions", json={**asked, "stream": True}) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        vectors(ask(url, input=TEXTS * 5))
        text = "".join(
            json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            for line in [first, *lines]
            if line.startswith("data: {")
        )
    assert text == alone


@pytest.mark.slow
def test_an_encoder_generates_nothing(encoder_url: str) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = httpx.post(f"{encoder_url}{path}", json={"model": MODEL, **fields})
        assert (answer.status_code, "generates no text" in answer.text) == (400, True), answer.text
    assert httpx.post(f"{encoder_url}/tokenize", json={"prompt": "a"}).json()["max_model_len"] == LONGEST
    for path in ("/ready", "/metrics", "/plan", "/v1/models"):
        assert httpx.get(f"{encoder_url}{path}").status_code == 200
    assert httpx.get(f"{encoder_url}/plan").json()["engine"]["runner"] == "encoder"


@pytest.mark.slow
def test_a_classifier_gives_no_embeddings() -> None:
    with serving(encoder_app(cross_encoder())) as url:
        answer = ask(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_supported")
