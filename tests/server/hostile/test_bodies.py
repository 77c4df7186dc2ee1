"""Bodies of megabytes that are wrong in every part: refused at the first, in few bytes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.errors import APIError, from_validation
from bigmodel.server.http.messages_bodies import CountTokensBody, MessagesBody
from bigmodel.server.http.pooled_bodies import EmbeddingsBody, RerankBody
from bigmodel.server.http.responses_bodies import ResponsesBody
from bigmodel.server.http.text_bodies import CompletionBody
from bigmodel.server.http.tokenize_bodies import DetokenizeBody

MANY = 200_000
BLOCK = {"type": "tool_result", "tool_use_id": 1}
USER = {"role": "user", "content": "x"}

BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "tokens of a prompt": (CompletionBody, {"model": "m", "prompt": [-1] * MANY}),
    "texts of a prompt": (CompletionBody, {"model": "m", "prompt": ["\ud800"] * MANY}),
    "lists of a prompt": (CompletionBody, {"model": "m", "prompt": [[-1]] * MANY}),
    "messages": (ChatBody, {"model": "m", "messages": [{"role": 5}] * 9000}),
    "too many messages": (ChatBody, {"model": "m", "messages": [USER] * MANY}),
    "parts of a message": (ChatBody, {"model": "m", "messages": [{"role": "user", "content": [{"type": 1}] * MANY}]}),
    "tools": (ChatBody, {"model": "m", "messages": [USER], "tools": [1] * MANY}),
    "stops": (CompletionBody, {"model": "m", "prompt": "x", "stop": [""] * MANY}),
    "biases": (CompletionBody, {"model": "m", "prompt": "x", "logit_bias": {str(n): 1e9 for n in range(MANY)}}),
    "unknown fields": (CompletionBody, {"model": "m", "prompt": "x", **{f"f{n}": 1 for n in range(MANY)}}),
    "messages of Anthropic's": (MessagesBody, {"model": "m", "max_tokens": 1, "messages": [{"role": 5}] * 9000}),
    "too many of them": (MessagesBody, {"model": "m", "max_tokens": 1, "messages": [USER] * MANY}),
    "blocks": (
        MessagesBody,
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [BLOCK] * MANY}]},
    ),
    "blocks of the system": (CountTokensBody, {"model": "m", "messages": [USER], "system": [{"type": 1}] * MANY}),
    "tools of Anthropic's": (CountTokensBody, {"model": "m", "messages": [USER], "tools": [{"name": 1}] * MANY}),
    "stop sequences": (MessagesBody, {"model": "m", "max_tokens": 1, "messages": [USER], "stop_sequences": [1] * MANY}),
    "items": (ResponsesBody, {"model": "m", "input": [{"type": 5}] * 9000}),
    "too many items": (ResponsesBody, {"model": "m", "input": [USER] * MANY}),
    "parts of an item": (ResponsesBody, {"model": "m", "input": [{"role": "user", "content": [{"type": 1}] * MANY}]}),
    "tools of responses": (ResponsesBody, {"model": "m", "input": "x", "tools": [{"type": 1}] * MANY}),
    "labels": (ResponsesBody, {"model": "m", "input": "x", "metadata": {str(n): 1 for n in range(MANY)}}),
    "includes": (ResponsesBody, {"model": "m", "input": "x", "include": [1] * MANY}),
    "inputs": (EmbeddingsBody, {"model": "m", "input": ["\ud800"] * MANY}),
    "too many inputs": (EmbeddingsBody, {"model": "m", "input": ["a"] * MANY}),
    "tokens of inputs": (EmbeddingsBody, {"model": "m", "input": [[-1]] * MANY}),
    "documents": (RerankBody, {"model": "m", "query": "a", "documents": [1] * MANY}),
    "too many documents": (RerankBody, {"model": "m", "query": "a", "documents": ["a"] * MANY}),
    "tokens to detokenize": (DetokenizeBody, {"model": "m", "tokens": [-1] * MANY}),
}


@pytest.mark.parametrize("name", BODIES)
def test_validation_ends_at_the_first_errors(name: str) -> None:
    kind, body = BODIES[name]
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 8
    error = from_validation([{**found, "loc": ("body", *found["loc"])} for found in refused.value.errors()])
    assert error.status in (400, 422)
    assert len(error.response().body) <= 1024


@pytest.mark.parametrize("text", ["x" * 8_000_000, "\x00" * 100_000, "\U0001f600" * 100_000, '"' * 5000])
def test_an_error_quotes_little_of_the_body(text: str) -> None:
    answer = APIError(404, f"the model '{text}' does not exist", param=text).response()
    assert len(answer.body) <= 1024


def test_a_user_message_without_content_is_refused() -> None:
    with pytest.raises(ValidationError, match="is required in a message of the role 'user'"):
        ChatBody.model_validate({"model": "m", "messages": [{"role": "user"}]})
    ChatBody.model_validate({"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": []}]})
