"""Tokenizing and detokenizing are each other's reverse."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


def test_a_texts_tokens_give_the_text_back(url: str) -> None:
    there = httpx.post(f"{url}/tokenize", json={"prompt": "the cat"}).json()
    assert there["count"] == len(there["tokens"]) == 5
    assert there["max_model_len"] == 1024
    back = httpx.post(f"{url}/detokenize", json={"tokens": there["tokens"]}).json()
    assert back == {"prompt": "the cat"}


@pytest.mark.parametrize(
    ("fields", "text"), [({}, "<user>hi\n<assistant>"), ({"add_generation_prompt": False}, "<user>hi\n")]
)
def test_a_conversation_is_tokenized_as_the_chat_template_writes_it(
    url: str, fields: dict[str, Any], text: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], **fields}
    tokens = httpx.post(f"{url}/tokenize", json=chat).json()["tokens"]
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_special_tokens_are_shown(url: str) -> None:
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "a<|end|>"}).json()["tokens"]
    assert len(tokens) == 2
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json() == {"prompt": "a<|end|>"}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    url: str, route: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = httpx.post(f"{url}/{route}", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
