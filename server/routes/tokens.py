"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from bigmodel.server.errors import bad_value
from bigmodel.server.intake import render
from bigmodel.server.schemas import DetokenizeBody, TokenizeBody
from bigmodel.server.state import state_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: Request) -> dict[str, Any]:
    """The tokens of a text, or of a conversation as the chat template writes it."""
    state = state_of(http)
    engine, codec = state.ready_engine()
    state.check_model(body.model)
    if body.messages is not None:
        tokens = await render(codec, body.messages, None, body.add_generation_prompt)
    else:
        assert body.prompt is not None
        tokens = await run_in_threadpool(codec.encode, body.prompt, add_special_tokens=body.add_special_tokens)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.core.max_length}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: Request) -> dict[str, str]:
    """The text of tokens, special ones included."""
    state = state_of(http)
    _, codec = state.ready_engine()
    state.check_model(body.model)
    for token in body.tokens:
        if token >= codec.vocabulary_size:
            raise bad_value("tokens", f"token {token} is not in the vocabulary of {codec.vocabulary_size}")
    return {"prompt": await run_in_threadpool(codec.decode, body.tokens, skip_special_tokens=False)}
