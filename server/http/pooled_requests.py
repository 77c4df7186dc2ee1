"""Texts of which the engine makes vectors or scores: in turns with others, a few at once, however many there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from fastapi import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.sampling.pooling import PoolingParams
from bigmodel.server.engine.scheduling.request import Request, SamplingParams
from bigmodel.server.http.client_limits import KEY, LATER, in_whose_name
from bigmodel.server.http.engine_requests import engine_id, submit_all
from bigmodel.server.http.errors import APIError, bad_value
from bigmodel.server.http.parsing import OffLoop, in_thread
from bigmodel.server.http.respond import JoinedRequests, unless_disconnected
from bigmodel.server.http.state import state_of

T = TypeVar("T")

_RETRY_SECONDS = 0.05

_PART = 64 << 10
"""Bytes of text that are tokenised at once: a client that leaves ends what follows."""

_CALL = 64
"""Bytes of text that take as long as a call of the tokenizer."""

_KEPT = 128 << 10
"""Bytes of text whose tokens are kept from the first time on."""


@dataclass(frozen=True)
class PooledText:
    """The tokens of a text, and what is to be made of them."""

    tokens: list[int]
    pooling: PoolingParams


class PooledTexts(Generic[T]):
    """Texts that are tokenised part by part, beside the event loop: all to find errors, and again to be computed.

    Tokens of few texts are kept in between. Those of many would take several times their memory.

    Args:
        given: The texts.
        size: Bytes of a text, about.
        tokenise: What is made of a text and its number; raises APIError.
        run: Where to tokenise.
    """

    def __init__(
        self, given: Seq[T], size: Callable[[T], int], tokenise: Callable[[int, T], PooledText], run: OffLoop
    ) -> None:
        self._given = given
        self._size = size
        self._tokenise = tokenise
        self._run = run
        self._kept: dict[int, PooledText] = {}
        self.tokens = 0
        """Tokens of all texts, once they are checked."""

    def __len__(self) -> int:
        return len(self._given)

    async def check(self) -> None:
        """Tokenise all texts once."""
        begin = held = 0
        while begin < len(self):
            end, total = begin, 0
            while end < len(self) and total < _PART:
                total += _CALL + self._size(self._given[end])
                end += 1
            texts = await self._run(total, partial(self._each, range(begin, end)))
            self.tokens += sum(len(text.tokens) for text in texts)
            held += total
            if held <= _KEPT:
                self._kept.update(zip(range(begin, end), texts, strict=True))
            begin = end

    async def part(self, begin: int, end: int) -> list[PooledText]:
        """Return the tokens of some texts."""
        numbers = range(begin, min(end, len(self)))
        total = sum(_CALL + self._size(self._given[number]) for number in numbers if number not in self._kept)
        return await self._run(total, partial(self._each, numbers))

    def _each(self, numbers: range) -> list[PooledText]:
        return [self._kept.get(number) or self._tokenise(number, self._given[number]) for number in numbers]


async def pooled(http: HTTPRequest, engine: Engine, texts: PooledTexts[T], adapter: str = "") -> torch.Tensor:
    """Return the vectors [texts, width], on the host, as the model with ``adapter`` gives them; "": without one.

    All are checked before the first is computed. The engine is given as many at once as it computes at once, and half
    as many where it also generates. Raises a 429 if there is no place for the first of them; the others wait for
    theirs, and a 504 when the time of a request has passed. Raises ClientGoneError when the client leaves.
    """
    state = state_of(http)
    limit = state.settings.request_timeout
    deadline = None if limit is None else time.monotonic() + limit
    vectors: torch.Tensor | None = None

    async def compute(begin: int, part: Seq[PooledText]) -> None:
        nonlocal vectors
        mailbox = state.mailbox(at_once=True)
        requests = []
        for number, text in enumerate(part):
            params = SamplingParams(max_tokens=0, pooling=text.pooling)
            made = Request(
                engine_id(http),
                text.tokens,
                params,
                mailbox.sink(number),
                deadline=deadline,
                client=in_whose_name(http.scope),
                key=http.scope.get(KEY, ""),
                priority=http.scope.get(LATER, 0),
                adapter=adapter,
            )
            requests.append(made)
        await _submit(engine, requests, waits=begin > 0, deadline=deadline)
        joined = JoinedRequests(engine, requests, mailbox)
        try:
            async for batch in joined.batches():
                for index, delta in batch:
                    assert delta.vector is not None
                    if vectors is None:
                        # One tensor: thousands of small ones take a kilobyte more each, and lie among freed blocks.
                        vectors = torch.empty(len(texts), len(delta.vector), dtype=torch.float32)
                    vectors[begin + index] = delta.vector
        finally:
            joined.release()

    async def compute_all() -> None:
        size = engine.core.scheduler.max_sequences
        if engine.core.generates:
            size = max(1, size // 2)  # texts that are generated find a place beside those of one client
        await texts.check()
        for begin in range(0, len(texts), size):
            await compute(begin, await texts.part(begin, begin + size))

    await unless_disconnected(http.receive, compute_all())
    assert vectors is not None
    return vectors


def in_parts(before: str, begins: Seq[int], part: Callable[[int], list[str]], after: str) -> Response:
    """An answer in JSON, whose entries are written part by part, beside the event loop if there are several parts.

    Args:
        before: What precedes the entries.
        begins: Numbers of the first entry of each part.
        part: Returns the entries of the part that begins with a number.
        after: What follows them.
    """
    if len(begins) <= 1:
        entries = [entry for begin in begins for entry in part(begin)]
        return Response(f"{before}{', '.join(entries)}{after}", media_type="application/json")

    async def parts() -> AsyncIterator[str]:
        yield before
        for begin in begins:
            yield await in_thread(lambda begin=begin: (", " if begin else "") + ", ".join(part(begin)))  # type: ignore[misc]
        yield after

    return StreamingResponse(parts(), media_type="application/json")


async def _submit(engine: Engine, requests: list[Request], *, waits: bool, deadline: float | None) -> None:
    while True:
        try:
            return submit_all(engine, requests)
        except APIError as error:
            if not waits or error.status != 429:
                raise
            if deadline is not None and time.monotonic() >= deadline:
                why = "the request timed out before all of its texts had a place"
                raise APIError(504, why, code="timeout") from error
        await asyncio.sleep(_RETRY_SECONDS)


def too_long(field: str, tokens: int, longest: int) -> APIError:
    """400: a text has more tokens than the model takes."""
    return bad_value(
        field, f"it is too long: it has at least {tokens} tokens; at most {longest} fit", code="context_length_exceeded"
    )
