"""POST /v1/embeddings: vectors of texts."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch
from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from bigmodel.errors import ServeError
from bigmodel.server.embedding_config import EmbeddingConfig
from bigmodel.server.engine.compute.encoder import scores
from bigmodel.server.engine.sampling.pooling import PoolingParams
from bigmodel.server.http.errors import APIError, bad_value
from bigmodel.server.http.parsing import JSONRoute, OffLoop, in_turn
from bigmodel.server.http.pooled_bodies import EmbeddingsBody
from bigmodel.server.http.pooled_requests import PooledText, PooledTexts, in_parts, pooled, too_long
from bigmodel.server.http.state import state_of
from bigmodel.server.models.running import RunningModel
from bigmodel.server.text.codec import TextCodec, TooManyTokensError

router = APIRouter(route_class=JSONRoute)

_VALUES = 16_384
"""Values that are written at once: writing takes about a microsecond for each, and nothing else runs meanwhile."""


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, http: HTTPRequest) -> Response:
    """A vector for each text."""
    async with state_of(http).model(http, body.model, generating=False) as model:
        config = _config(model)
        _check_dimensions(body, config.width)
        longest = model.engine.core.max_length
        texts = _texts(body, PoolingParams(config.pooling), model.codec, longest, in_turn(http))
        vectors = await pooled(http, model.engine, texts, state_of(http).adapter_of(body.model))
        name = state_of(http).adapter_of(body.model) or model.name
    _check_dimensions(body, vectors.shape[1])
    usage = {"prompt_tokens": texts.tokens, "total_tokens": texts.tokens}
    return _response(vectors, body, json.dumps({"model": name, "usage": usage}))


def _config(model: RunningModel) -> EmbeddingConfig:
    """How states become an embedding; 400 for a model whose states cannot, and for one that scores texts."""
    if scores(model.model):
        why = f"'{model.name}' scores texts and gives no embeddings; ask /v1/rerank"
        raise APIError(400, why, param="model", code="model_not_supported")
    try:
        return model.embedding_config
    except ServeError as error:
        raise APIError(400, str(error), param="model", code="model_not_supported") from error


def _check_dimensions(body: EmbeddingsBody, width: int | None) -> None:
    """Raise a 400 where more values are asked for than vectors have; None: it is not known how many they have."""
    if body.dimensions is not None and width is not None and body.dimensions > width:
        raise bad_value("dimensions", f"the model's vectors have {width} values; at most so many can be kept")


def _texts(
    body: EmbeddingsBody, params: PoolingParams, codec: TextCodec, longest: int, run: OffLoop
) -> PooledTexts[Any]:
    """Tokens of each input: 400 for one that is too long, unless it may be shortened."""
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


def finished(vectors: torch.Tensor, body: EmbeddingsBody) -> torch.Tensor:
    """The vectors [texts, width] as asked for: their first values, of length 1."""
    kept = vectors[:, : body.dimensions]
    return kept / kept.norm(dim=1, keepdim=True).clamp(min=1e-12) if body.normalize else kept


def _response(vectors: torch.Tensor, body: EmbeddingsBody, end: str) -> Response:
    """The answer; one that is large is written part by part, beside the event loop."""
    size = max(1, _VALUES // max(1, vectors.shape[1]))

    def part(begin: int) -> list[str]:
        rows = enumerate(finished(vectors[begin : begin + size], body), begin)
        return [_entry(index, vector, body.encoding_format) for index, vector in rows]

    return in_parts('{"object": "list", "data": [', range(0, len(vectors), size), part, f"], {end[1:]}")


def _entry(index: int, vector: torch.Tensor, encoding: str) -> str:
    value: Any = vector.tolist()
    if encoding == "base64":
        value = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
    return json.dumps({"object": "embedding", "index": index, "embedding": value})
