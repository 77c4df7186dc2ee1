"""POST /v1/rerank: documents in the order of how well they answer a query, in the form of Jina and Cohere."""

from __future__ import annotations

import json
import uuid
from typing import Any

import torch
from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from bigmodel.server.engine.compute.encoder import scores
from bigmodel.server.engine.sampling.pooling import PoolingParams
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.parsing import JSONRoute, OffLoop, in_turn
from bigmodel.server.http.pooled_bodies import RerankBody
from bigmodel.server.http.pooled_requests import PooledText, PooledTexts, in_parts, pooled, too_long
from bigmodel.server.http.state import state_of
from bigmodel.server.models.running import RunningModel
from bigmodel.server.text.codec import TextCodec

router = APIRouter(route_class=JSONRoute)

_RESULTS = 32
"""Documents that are written at once."""


@router.post("/v1/rerank")
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def rerank(body: RerankBody, http: HTTPRequest) -> Response:
    """The documents, the most relevant one first, with their scores."""
    async with state_of(http).model(http, body.model, generating=False) as model:
        _check_scores(model)
        texts = _pairs(body, model.codec, model.engine.core.max_length, in_turn(http))
        found = relevance((await pooled(http, model.engine, texts))[:, 0], model.model.config)
    order = sorted(range(len(found)), key=lambda index: (-found[index], index))[: body.top_n]
    usage = {"prompt_tokens": texts.tokens, "total_tokens": texts.tokens}
    head = {"id": f"rerank-{uuid.uuid4().hex}", "model": model.name, "usage": usage}
    documents = body.texts if body.return_documents else None

    def part(begin: int) -> list[str]:
        return [_result(index, found[index], documents) for index in order[begin : begin + _RESULTS]]

    return in_parts(f'{json.dumps(head)[:-1]}, "results": [', range(0, len(order), _RESULTS), part, "]}")


def _result(index: int, score: float, documents: list[str] | None) -> str:
    document = {} if documents is None else {"document": {"text": documents[index]}}
    return json.dumps({"index": index, "relevance_score": score, **document}, ensure_ascii=False)


def relevance(logits: torch.Tensor, config: Any) -> list[float]:
    """Scores between 0 and 1, or as the head gives them where the model's config asks for that."""
    known = getattr(config, "sentence_transformers", None)
    activation = str((known or {}).get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", ""))
    values: list[float] = (logits if activation.endswith("Identity") else logits.double().sigmoid()).tolist()
    return values


def _check_scores(model: RunningModel) -> None:
    labels = model.model.config.num_labels if scores(model.model) else 0
    if labels != 1:
        has = f"its head has {labels} labels" if labels else "it has no head for sequence classification"
        why = f"'{model.name}' ranks nothing: {has}; a cross-encoder with one label is needed"
        raise APIError(400, why, param="model", code="model_not_supported")


def _pairs(body: RerankBody, codec: TextCodec, longest: int, run: OffLoop) -> PooledTexts[str]:
    """The query with each document; 400 for a pair that is too long, unless documents may be shortened."""

    def pair(number: int, text: str) -> PooledText:
        if body.max_tokens_per_doc is not None:
            text = codec.shortened(text, body.max_tokens_per_doc)
        if body.truncate_prompt_tokens is not None:
            text = codec.shortened(text, longest)
        tokens, types = codec.encode_pair(body.query, text)
        if len(tokens) > longest and body.truncate_prompt_tokens is not None:
            own = len(codec.encode(text, add_special_tokens=False))
            tokens, types = codec.encode_pair(body.query, codec.shortened(text, own - (len(tokens) - longest)))
        if len(tokens) > longest:
            raise too_long(f"documents.{number}", len(tokens), longest)
        return PooledText(tokens, PoolingParams("score", tuple(types) if any(types) else None))

    return PooledTexts(body.texts, lambda text: len(body.query) + len(text), pair, run)
