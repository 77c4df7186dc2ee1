"""What `vllm bench serve` sends and how it reads the answers; its package needs a GPU or a build of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.live import MODEL

SAMPLING = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def messages_of(answer: httpx.Response) -> Iterator[str]:
    """Events as they come, split anywhere: one is complete at its empty line, or where its JSON is."""
    buffer = ""
    for piece in answer.iter_text():
        buffer += piece
        while "\n\n" in buffer:
            message, buffer = buffer.split("\n\n", 1)
            if message.strip() and not message.startswith(":"):
                yield message.strip().removeprefix("data: ")
    assert not buffer.strip()


def measured(url: str, path: str, body: dict[str, Any]) -> tuple[str, int, int, int]:
    """Text, chunks with a choice, and tokens of prompt and answer as the usage says."""
    text, chunks, prompt, completion = "", 0, 0, 0
    headers = {"x-request-id": "bench-7", "Authorization": "Bearer none"}
    with httpx.stream("POST", f"{url}{path}", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["x-request-id"] == "bench-7"
        for message in messages_of(answer):
            if message == "[DONE]":
                continue
            data = json.loads(message)
            if choices := data.get("choices"):
                chunks += 1
                text += choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
            elif usage := data.get("usage"):
                prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    return text, chunks, prompt, completion


def asked(path: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    if path.endswith("chat/completions"):
        body |= {"messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]}
        return body | {"max_completion_tokens": 12, **fields}
    return body | {"prompt": "the cat", "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None, **fields}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("sampling", [{}, SAMPLING])
def test_an_answer_has_as_many_tokens_as_were_asked_for(url: str, path: str, sampling: dict[str, Any]) -> None:
    text, chunks, prompt, completion = measured(url, path, asked(path, ignore_eos=True, **sampling))
    assert text
    assert (prompt > 0, completion) == (True, 12)
    assert 2 <= chunks <= 14  # one for each token at most, beside the role and the end


def test_a_prompt_may_be_tokens(url: str) -> None:
    body = asked("/v1/completions", prompt=[5] * 7, ignore_eos=True, logprobs=1)
    assert measured(url, "/v1/completions", body)[2:] == (7, 12)


def test_vectors_of_texts_that_may_be_shortened(url: str) -> None:
    body = {"model": MODEL, "input": "the cat", "truncate_prompt_tokens": -1}
    for given in ("the cat", ["a", "b"], "x" * 2000):
        answer = httpx.post(f"{url}/v1/embeddings", json={**body, "input": given})
        assert 0 < answer.json()["usage"]["prompt_tokens"] <= 1024


def test_the_name_of_the_model_and_readiness(url: str) -> None:
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == MODEL
    assert httpx.get(f"{url}/health").status_code == 200
