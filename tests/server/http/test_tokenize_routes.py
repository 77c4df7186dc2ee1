"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from bigmodel.server.text.codec import TextCodec
from bigmodel.server.text.long_texts import EncodeError, EncoderGoneError
from tests.server.live import serving, tiny_app
from tests.server.tiny import tiny_model

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
GO_ON = {"continue_final_message": True}


def test_a_texts_tokens_give_the_text_back(url: str) -> None:
    there = httpx.post(f"{url}/tokenize", json={"prompt": "the cat"}).json()
    assert there["count"] == len(there["tokens"]) == 5
    assert there["max_model_len"] == 1024
    back = httpx.post(f"{url}/detokenize", json={"tokens": there["tokens"]}).json()
    assert back == {"prompt": "the cat"}


@pytest.mark.parametrize(
    ("kind", "status", "code", "later"),
    [(EncodeError, 400, "text_not_tokenised", None), (EncoderGoneError, 503, "tokenizer_gone", "1")],
)
def test_a_text_that_cannot_be_tokenised_is_an_error_of_its_request(
    url: str, monkeypatch: pytest.MonkeyPatch, kind: type[EncodeError], status: int, code: str, later: str | None
) -> None:
    def fails(*_: object, **__: object) -> list[int]:
        raise kind("why")

    monkeypatch.setattr(TextCodec, "encode", fails)
    answer = httpx.post(f"{url}/tokenize", json={"prompt": "the cat"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (status, code, "why")
    assert answer.headers.get("retry-after") == later


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "<user>hi\n<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi\n"),
        (GO_ON, "<user>hi"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "[tools: 1]\n<user>hi\n<assistant>"),
    ],
)
def test_a_conversation_is_tokenized_as_the_chat_template_writes_it(
    url: str, fields: dict[str, Any], text: str
) -> None:
    tokens = httpx.post(f"{url}/tokenize", json={**CHAT, **fields}).json()["tokens"]
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_special_tokens_are_shown(url: str) -> None:
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "a<|end|>"}).json()["tokens"]
    assert len(tokens) == 2
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json() == {"prompt": "a<|end|>"}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("tokenize", {**CHAT, "add_generation_prompt": True, **GO_ON}, 400, "continue_final_message"),
        ("tokenize", {**CHAT, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
        ("tokenize", {**CHAT, "chat_template": "x"}, 400, "chat_template"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_invalid_requests_are_refused(url: str, route: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = httpx.post(f"{url}/{route}", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_the_names_of_tokens_are_given_on_request(url: str) -> None:
    given = {"prompt": "in the", "return_token_strs": True}
    assert httpx.post(f"{url}/tokenize", json=given).json()["token_strs"] == ["in", "Ġthe"]
    assert "token_strs" not in httpx.post(f"{url}/tokenize", json={"prompt": "a"}).json()


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("tokenize", {"prompt": "qx " * 400}, "prompt"),
        ("tokenize", {"messages": [{"role": "user", "content": "qx " * 400}]}, "messages"),
        ("detokenize", {"tokens": [5] * 1025}, "tokens"),
    ],
)
def test_more_tokens_than_the_context_has_are_refused(url: str, route: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}/{route}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "at most 1024 fit" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_as_many_tokens_as_the_context_has_are_given() -> None:
    context = 1 << 15
    with serving(tiny_app(tiny_model(max_position_embeddings=context))) as url:
        given = httpx.post(f"{url}/tokenize", json={"prompt": "q" * context, "return_token_strs": True}).json()
        assert (given["count"], given["tokens"], given["token_strs"]) == (context, [80] * context, ["q"] * context)
        assert httpx.post(f"{url}/detokenize", json={"tokens": given["tokens"]}).json() == {"prompt": "q" * context}


@pytest.mark.slow
def test_a_text_far_beyond_a_long_context_is_not_tokenized_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    outside = TextCodec._outside

    def counting(self: TextCodec, texts: Sequence[str], wanted: Sequence[str], *, special: bool) -> Any:
        read.extend(map(len, texts))
        return outside(self, texts, wanted, special=special)

    monkeypatch.setattr(TextCodec, "_outside", counting)
    context = 1 << 15
    with serving(tiny_app(tiny_model(max_position_embeddings=context))) as url:
        answer = httpx.post(f"{url}/tokenize", json={"prompt": "qx " * 300_000}, timeout=60)
    assert answer.status_code == 400
    assert read
    assert max(read) < 3 * context
