"""A request, the sequences it is made of, and the events it sends back."""

from __future__ import annotations

import itertools
import os
import random
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from bigmodel.server.engine.params import SamplingParams

if TYPE_CHECKING:
    from bigmodel.server.engine.cache import SequenceKV

_order = itertools.count()


class Phase(Enum):
    """Where a sequence is on its way through the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprob:
    """One token with its natural-log probability and the likeliest alternatives (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """New text of one choice of a request. ``finish_reason`` is set on its last delta only."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Done:
    """Every choice of the request has finished."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Failed:
    """The request ended without an answer. ``kind`` is "engine", "timeout" or "cancelled"."""

    kind: str
    message: str


Event = Delta | Done | Failed


class Sink(Protocol):
    """Where a request's events go. Called from the engine's thread; must not block."""

    def put(self, event: Event, /) -> None: ...


@dataclass
class Request:
    """One accepted request: a prompt, ``n`` choices, and where to send what is generated.

    ``deadline`` is in seconds of :func:`time.monotonic`, or None.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    sink: Sink
    n: int = 1
    deadline: float | None = None
    arrived: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        seed = self.params.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        self.sequences = [Sequence(self, index, seed) for index in range(self.n)]

    @property
    def finished(self) -> bool:
        return all(sequence.phase is Phase.FINISHED for sequence in self.sequences)

    @property
    def completion_tokens(self) -> int:
        return sum(len(sequence.output) for sequence in self.sequences)


class Sequence:
    """One choice of a request while it is generated.

    ``computed`` counts the leading tokens whose keys and values are in ``kv``; the sequence is ready to
    sample when it equals ``len(self)``.
    """

    def __init__(self, request: Request, index: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.order = next(_order)
        self.output: list[int] = []
        self.draft: list[int] = []  # guesses at what follows, to be checked in the next step
        self.computed = 0
        self.cached_tokens = 0
        self.kv: SequenceKV | None = None
        self.phase = Phase.WAITING
        # A generator of its own, so that what other requests draw cannot change what this one draws.
        self.rng = random.Random(seed * 1_000_003 + index)
        self.text: Any = None  # the text pipeline of this choice, set by the engine
        self.grammar_state: Any = None
        self.preemptions = 0
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.started_at: float | None = None
        self.last_token_at: float | None = None
        self.prompt_sent = False

    def __len__(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether only the last sampled token is left to compute."""
        return self.remaining == 1 and bool(self.output)

    def token_slice(self, start: int, end: int) -> list[int]:
        """Tokens ``start`` to ``end`` of prompt followed by output."""
        split = self.prompt_length
        if end <= split:
            return self.request.prompt[start:end]
        if start >= split:
            return self.output[start - split : end - split]
        return self.request.prompt[start:] + self.output[: end - split]
