"""POST /tokenize and /detokenize: text to tokens and back, as vLLM's server has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest

from bigmodel.server.http.chat_requests import check_template_variables, render
from bigmodel.server.http.errors import bad_value
from bigmodel.server.http.parsing import JSONRoute, OffLoop, in_turn
from bigmodel.server.http.state import state_of
from bigmodel.server.http.tokenize_bodies import DetokenizeBody, TokenizeBody
from bigmodel.server.text.codec import TextCodec

router = APIRouter(route_class=JSONRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: HTTPRequest) -> dict[str, Any]:
    """The tokens of a text, or of a conversation in the model's chat template."""
    state = state_of(http)
    longest, codec = state.ready_text()
    state.check_model(body.model)
    run = in_turn(http)
    tokens = await (_text_tokens(body, codec, run) if body.messages is None else _chat_tokens(body, codec, run))
    found: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": longest}
    if body.return_token_strs:
        found["token_strs"] = await run(4 * len(tokens), lambda: codec.pieces(tokens))
    return found


async def _text_tokens(body: TokenizeBody, codec: TextCodec, run: OffLoop) -> list[int]:
    text, special = body.prompt or "", body.add_special_tokens is not False
    return await run(len(text), lambda: codec.encode(text, add_special_tokens=special))


async def _chat_tokens(body: TokenizeBody, codec: TextCodec, run: OffLoop) -> list[int]:
    check_template_variables(codec, body.chat_template_kwargs)
    tools = [tool.plain() for tool in body.tools or ()]
    special = bool(body.add_special_tokens)
    return await render(codec, body.messages or [], tools, body.template_arguments, special=special, run=run)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: HTTPRequest) -> dict[str, str]:
    """The text of tokens, special ones included."""
    state = state_of(http)
    _, codec = state.ready_text()
    state.check_model(body.model)
    highest = max(body.tokens, default=0)
    if highest >= codec.vocabulary_size:
        raise bad_value("tokens", f"token {highest} is not in the vocabulary of {codec.vocabulary_size}")
    text = await in_turn(http)(4 * len(body.tokens), lambda: codec.decode(body.tokens, skip_special_tokens=False))
    return {"prompt": text}
