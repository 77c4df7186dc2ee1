"""POST /tokenize and /detokenize: text to tokens and back, as vLLM's server has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from pydantic_core import to_json
from starlette.responses import Response

from bigmodel.server.http.chat_requests import check_template_variables, render
from bigmodel.server.http.engine_requests import encode_prompt, too_long
from bigmodel.server.http.errors import bad_value
from bigmodel.server.http.parsing import JSONRoute, OffLoop, in_turn
from bigmodel.server.http.state import state_of
from bigmodel.server.http.tokenize_bodies import DetokenizeBody, TokenizeBody
from bigmodel.server.text.codec import TextCodec

router = APIRouter(route_class=JSONRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: HTTPRequest) -> Response:
    """The tokens of a text, or of a conversation in the model's chat template; 400 for more than the context has."""
    async with state_of(http).model(http, body.model, generating=False) as model:
        longest, codec = model.engine.core.max_length, model.codec
    run = in_turn(http)
    in_tokens = _text_tokens if body.messages is None else _chat_tokens
    tokens = await in_tokens(body, codec, longest, run)
    found: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": longest}
    if body.return_token_strs:
        found["token_strs"] = await run(4 * len(tokens), lambda: codec.pieces(tokens))
    # Not as a dict: FastAPI would copy that in the event loop, value by value.
    return Response(await run(8 * len(tokens), lambda: to_json(found)), media_type="application/json")


async def _text_tokens(body: TokenizeBody, codec: TextCodec, longest: int, run: OffLoop) -> list[int]:
    return await encode_prompt(codec, body.prompt or "", body.add_special_tokens is not False, longest, "prompt", run)


async def _chat_tokens(body: TokenizeBody, codec: TextCodec, longest: int, run: OffLoop) -> list[int]:
    check_template_variables(codec, body.chat_template_kwargs)
    tools = [tool.plain() for tool in body.tools or ()]
    special = bool(body.add_special_tokens)
    messages, arguments = body.messages or [], body.template_arguments
    return await render(codec, messages, tools, arguments, longest, special=special, run=run)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: HTTPRequest) -> dict[str, str]:
    """The text of tokens, special ones included; 400 for more than the context has."""
    async with state_of(http).model(http, body.model, generating=False) as model:
        longest, codec = model.engine.core.max_length, model.codec
    highest = max(body.tokens, default=0)
    if highest >= codec.vocabulary_size:
        raise bad_value("tokens", f"token {highest} is not in the vocabulary of {codec.vocabulary_size}")
    if len(body.tokens) > longest:
        raise too_long(len(body.tokens), longest, "tokens")
    text = await in_turn(http)(4 * len(body.tokens), lambda: codec.decode(body.tokens, skip_special_tokens=False))
    return {"prompt": text}
