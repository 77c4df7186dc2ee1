"""POST /v1/embeddings: vectors of texts."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import torch
from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from bigmodel.server.engine.compute.encoder import scores
from bigmodel.server.engine.sampling.pooling import PoolingParams
from bigmodel.server.http.errors import APIError, bad_value
from bigmodel.server.http.parsing import JSONRoute, OffLoop, in_thread, in_turn
from bigmodel.server.http.pooled_bodies import EmbeddingsBody
from bigmodel.server.http.pooled_requests import PooledText, PooledTexts, pooled, too_long
from bigmodel.server.http.state import state_of
from bigmodel.server.text.codec import TextCodec, TooManyTokensError

router = APIRouter(route_class=JSONRoute)

_VALUES = 16_384
"""Values that are written at once: writing takes about a microsecond for each, and nothing else runs meanwhile."""


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, http: HTTPRequest) -> Response:
    """A vector for each text."""
    state = state_of(http)
    engine, codec = state.ready_engine(generating=False)
    state.check_model(body.model)
    if scores(state.model):
        why = f"'{state.settings.model_name}' scores texts and gives no embeddings; ask /v1/rerank"
        raise APIError(400, why, param="model", code="model_not_supported")
    params = PoolingParams(state.embedding_config().pooling)
    texts = _texts(body, params, codec, engine.core.max_length, in_turn(http))
    vectors = await pooled(http, engine, texts)
    width = len(vectors[0])
    if body.dimensions is not None and body.dimensions > width:
        raise bad_value("dimensions", f"the model's vectors have {width} values; at most so many can be kept")
    end = json.dumps(
        {"model": state.settings.model_name, "usage": {"prompt_tokens": texts.tokens, "total_tokens": texts.tokens}}
    )
    return _response([finished(each, body) for each in vectors], body.encoding_format, end)


def _texts(
    body: EmbeddingsBody, params: PoolingParams, codec: TextCodec, longest: int, run: OffLoop
) -> PooledTexts[Any]:
    """Tokens of each input: 413 for one that is too long, unless it may be shortened."""
    wanted = body.truncate_prompt_tokens
    keep = None if wanted is None else longest if wanted == -1 else min(wanted, longest)
    given = body.inputs

    def tokenise(number: int, value: Any) -> PooledText:
        field = "input" if len(given) == 1 else f"input.{number}"
        tokens = _of_text(codec, value, longest, keep, field) if isinstance(value, str) else value[:keep]
        if not tokens:
            raise bad_value(field, "the text has no tokens")
        if max(tokens) >= codec.vocabulary_size:
            raise bad_value(field, f"token {max(tokens)} is not in the vocabulary of {codec.vocabulary_size}")
        if len(tokens) > longest:
            raise too_long(field, len(tokens), longest)
        return PooledText(tokens, params)

    return PooledTexts(given, len, tokenise, run)


def _of_text(codec: TextCodec, text: str, longest: int, keep: int | None, field: str) -> list[int]:
    try:
        if keep is None:
            return codec.encode(text, longest=longest)
    except TooManyTokensError as error:
        raise too_long(field, error.least, longest) from error
    text = codec.shortened(text, keep)
    tokens = codec.encode(text)
    if len(tokens) <= keep:
        return tokens
    special = len(tokens) - len(codec.encode(text, add_special_tokens=False))
    return codec.encode(codec.shortened(text, keep - special))[:keep]


def finished(vector: torch.Tensor, body: EmbeddingsBody) -> torch.Tensor:
    """The vector as asked for: its first values, of length 1."""
    kept = vector[: body.dimensions]
    return kept / kept.norm().clamp(min=1e-12) if body.normalize else kept


def _response(vectors: list[torch.Tensor], encoding: str, end: str) -> Response:
    """The answer; one that is large is written part by part, beside the event loop."""
    size = max(1, _VALUES // max(1, len(vectors[0])))

    def part(begin: int) -> bytes:
        entries = [_entry(index, vectors[index], encoding) for index in range(begin, min(begin + size, len(vectors)))]
        return ((", " if begin else "") + ", ".join(entries)).encode()

    before, after = b'{"object": "list", "data": [', f"], {end[1:]}".encode()
    if len(vectors) <= size:
        return Response(before + part(0) + after, media_type="application/json")

    async def parts() -> AsyncIterator[bytes]:
        yield before
        for begin in range(0, len(vectors), size):
            yield await in_thread(lambda begin=begin: part(begin))  # type: ignore[misc]
        yield after

    return StreamingResponse(parts(), media_type="application/json")


def _entry(index: int, vector: torch.Tensor, encoding: str) -> str:
    value: Any = vector.tolist()
    if encoding == "base64":
        value = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
    return json.dumps({"object": "embedding", "index": index, "embedding": value})
