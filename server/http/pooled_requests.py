"""Texts of which the engine makes vectors or scores: in turns with others, a few at once, however many there are."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request as HTTPRequest

from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.sampling.pooling import PoolingParams
from bigmodel.server.engine.scheduling.request import Request, SamplingParams
from bigmodel.server.http.engine_requests import submit_all
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.parsing import OffLoop
from bigmodel.server.http.respond import JoinedRequests, unless_disconnected
from bigmodel.server.http.state import state_of

T = TypeVar("T")

_RETRY_SECONDS = 0.05

_PART = 64 << 10
"""Bytes of text that are tokenised at once: a client that leaves ends what follows."""


@dataclass(frozen=True)
class PooledText:
    """The tokens of a text, and what is to be made of them."""

    tokens: list[int]
    pooling: PoolingParams


async def pooled(http: HTTPRequest, engine: Engine, texts: Seq[PooledText]) -> list[Any]:
    """Return a vector for each text, as tensors on the host.

    The engine is given as many at once as it computes at once. Raises a 429 if there is no place for the first of
    them; the others wait for theirs. Raises ClientGoneError when the client leaves.
    """
    state = state_of(http)
    limit = state.settings.request_timeout
    deadline = None if limit is None else time.monotonic() + limit
    vectors: list[Any] = [None] * len(texts)

    async def compute(begin: int, part: Seq[PooledText]) -> None:
        mailbox = state.mailbox(at_once=True)
        requests = []
        for number, text in enumerate(part):
            params = SamplingParams(max_tokens=0, pooling=text.pooling)
            requests.append(Request(uuid.uuid4().hex, text.tokens, params, mailbox.sink(number), deadline=deadline))
        await _submit(engine, requests, waits=begin > 0)
        joined = JoinedRequests(engine, requests, mailbox)
        try:
            async for batch in joined.batches():
                for index, delta in batch:
                    vectors[begin + index] = delta.vector
        finally:
            joined.release()

    async def compute_all() -> None:
        size = engine.core.scheduler.max_sequences
        for begin in range(0, len(texts), size):
            await compute(begin, texts[begin : begin + size])

    await unless_disconnected(http.receive, compute_all())
    return vectors


async def _submit(engine: Engine, requests: list[Request], *, waits: bool) -> None:
    while True:
        try:
            return submit_all(engine, requests)
        except APIError as error:
            if not waits or error.status != 429:
                raise
        await asyncio.sleep(_RETRY_SECONDS)


async def tokenised(
    texts: Seq[T], size: Callable[[T], int], tokenise: Callable[[int, T], PooledText], run: OffLoop
) -> list[PooledText]:
    """Return what ``tokenise`` makes of each text and its number, a part of them at a time.

    ``size``: bytes of a text, about.
    """
    found: list[PooledText] = []
    while len(found) < len(texts):
        end, total = len(found), 0
        while end < len(texts) and total < _PART:
            total += size(texts[end])
            end += 1
        found += await run(total, partial(_each, texts, range(len(found), end), tokenise))
    return found


def _each(texts: Seq[T], part: range, tokenise: Callable[[int, T], PooledText]) -> list[PooledText]:
    return [tokenise(number, texts[number]) for number in part]


def too_long(field: str, tokens: int, longest: int) -> APIError:
    """413: a text has more tokens than the model takes."""
    return APIError(
        413, f"it has at least {tokens} tokens; at most {longest} fit", param=field, code="context_length_exceeded"
    )
