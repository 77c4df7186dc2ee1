"""Documents come back in the order of the scores that the model's own forward gives."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from bigmodel.server.http.rerank_routes import relevance
from tests.server.encoders import cross_encoder, encoder, encoder_app, pair_tokenizer
from tests.server.live import MODEL, serving

QUERY = "the cat"
DOCUMENTS = ["in the end", "then", {"text": "the cat in the tent " * 3}, "a", "the"]


@pytest.fixture(scope="module")
def reranker() -> Iterator[str]:
    with serving(encoder_app(cross_encoder())) as url:
        yield url


def ask(url: str, path: str = "/v1/rerank", **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": MODEL, "query": QUERY, "documents": DOCUMENTS, **fields})


def own_scores() -> list[float]:
    found = []
    for document in DOCUMENTS:
        text = document if isinstance(document, str) else document["text"]
        encoded = pair_tokenizer()(QUERY, text, return_tensors="pt")
        assert encoded["token_type_ids"].any()
        with torch.no_grad():
            found.append(float(cross_encoder()(**encoded).logits[0, 0].sigmoid()))
    return found


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_scores_are_those_of_the_models_own_forward(reranker: str, path: str) -> None:
    answer = ask(reranker, path).json()
    scores = own_scores()
    order = [result["index"] for result in answer["results"]]
    assert order == sorted(range(len(scores)), key=lambda index: -scores[index])
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], rel=1e-4)
    texts = [document if isinstance(document, str) else document["text"] for document in DOCUMENTS]
    assert [result["document"]["text"] for result in answer["results"]] == [texts[index] for index in order]
    tokens = sum(len(pair_tokenizer()(QUERY, text)["input_ids"]) for text in texts)
    assert (answer["model"], answer["usage"]["total_tokens"]) == (MODEL, tokens)
    assert answer["id"].startswith("rerank-")


@pytest.mark.slow
def test_many_documents_are_answered_as_a_few_are(reranker: str) -> None:
    documents = [f'{number} \u00e9 "the" cat' for number in range(100)]
    whole = ask(reranker, documents=documents).json()["results"]
    assert sorted(result["index"] for result in whole) == list(range(100))
    assert all(result["document"]["text"] == documents[result["index"]] for result in whole)
    scores = [result["relevance_score"] for result in whole]
    assert scores == sorted(scores, reverse=True)
    few = ask(reranker, documents=documents, top_n=7).json()["results"]
    assert [each["index"] for each in few] == [each["index"] for each in whole[:7]]


def test_the_best_without_their_texts(reranker: str) -> None:
    results = ask(reranker, top_n=2, return_documents=False).json()["results"]
    assert [set(result) for result in results] == [{"index", "relevance_score"}] * 2


def test_long_documents_are_refused_or_shortened(reranker: str) -> None:
    long = "a" * 1000
    answer = ask(reranker, documents=["a", long])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents.1")
    assert ask(reranker, documents=["a", long], truncate_prompt_tokens=-1).status_code == 200
    cut, short = (
        ask(reranker, documents=[document], **fields).json()["results"][0]["relevance_score"]
        for document, fields in ((long, {"max_tokens_per_doc": 7}), ("a" * 7, {}))
    )
    assert cut == pytest.approx(short, rel=1e-5)


def test_a_query_that_leaves_no_room_is_refused(reranker: str) -> None:
    answer = ask(reranker, query="a" * 500, documents=["b"], truncate_prompt_tokens=-1)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"documents": []}, 400, "documents"),
        ({"documents": ["a"] * 2049}, 400, "documents"),
        ({"documents": [{"text": "a", "title": "a"}]}, 400, "documents.0.title"),
        ({"documents": [5]}, 422, "documents.0"),
        ({"documents": [{"text": 5}]}, 422, "documents.0.text"),
        ({"top_n": 0}, 400, "top_n"),
        ({"model": "other"}, 404, "model"),
        ({"rank_fields": ["a"]}, 400, "rank_fields"),
        ({"max_chunks_per_doc": 3}, 400, "max_chunks_per_doc"),
    ],
)
def test_what_cannot_be_is_refused_by_name(reranker: str, fields: dict[str, Any], status: int, param: str) -> None:
    answer = ask(reranker, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.slow
def test_models_without_one_score_rank_nothing(url: str) -> None:
    for app in (encoder_app(encoder()), encoder_app(cross_encoder(num_labels=3))):
        with serving(app) as other:
            assert (ask(other).status_code, "ranks nothing" in ask(other).text) == (400, True)
    assert ask(url).json()["error"]["code"] == "model_not_supported"


def test_scores_are_between_0_and_1_unless_the_model_says_otherwise() -> None:
    logits = torch.tensor([0.0, 2.0])
    assert relevance(logits, SimpleNamespace()) == pytest.approx([0.5, 0.8807970779])
    asked = {"activation_fn": "torch.nn.modules.linear.Identity"}
    assert relevance(logits, SimpleNamespace(sentence_transformers=asked)) == [0.0, 2.0]
