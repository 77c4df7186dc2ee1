"""Requests, the sequences they generate, and the events and counts that the engine reports about them.

A request is one prompt with sampling parameters; it generates ``n`` sequences. Its events go to its sink.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from bigmodel.server.engine.kv.buffers import SequenceKV
from bigmodel.server.engine.kv.prefix_files import BlockFile

_order = itertools.count()


# --- what a request asks for --------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, already validated.

    Args:
        max_tokens: Tokens to generate at most.
        temperature: Divides the logits; 0 is greedy decoding.
        top_p: Keep the likeliest tokens whose probabilities reach this sum; 1 keeps all.
        top_k: Keep so many of the likeliest tokens; 0 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest.
        seed: Seed of the request's random numbers; None takes one from the system.
        stop: Strings that end the text; none of them is part of it.
        presence_penalty: Subtracted once from the logit of each token generated so far.
        frequency_penalty: Subtracted from the logit of each generated token, once per occurrence.
        repetition_penalty: Divides positive and multiplies negative logits of all tokens of prompt and output.
        logit_bias: Token id to addend; added after the penalties.
        logprobs: Number of alternatives reported with each token; 0 reports the chosen token only, None nothing.
            Log-probabilities are those of the model's own distribution, before any adjustment above.
        prompt_logprobs: Report log-probabilities of the prompt's tokens too.
        ignore_eos: Treat end-of-text tokens as any other.
        stop_token_ids: Tokens that end the text too; they are not shown.
        min_tokens: Tokens before which no token ends the text.
        allowed_token_ids: The only tokens that may be drawn; None for all.
        grammar: Compiled constraint on the output, see :mod:`bigmodel.server.engine.sampling.grammar`.
        reasoning: Bound on the reasoning, see :mod:`bigmodel.server.engine.sampling.reasoning_budget`.
        pooling: Ask for a vector and not for text, see :mod:`bigmodel.server.engine.sampling.pooling`.
        kept_special: Id and text of the special tokens that the text shows; it shows no others.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Any = None
    reasoning: Any = None
    pooling: Any = None
    kept_special: Mapping[int, str] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether any field changes which token is chosen from the logits."""
        return bool(
            self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.grammar is not None
            or self.reasoning is not None
            or self.min_tokens > 0
            or self.allowed_token_ids is not None
        )


# --- events -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenLogprob:
    """One token with its natural-log probability and the likeliest alternatives (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """New text of sequence ``index`` of a request.

    ``finish_reason`` is set on its last delta only, and ``stop`` there if one of the stop strings ended the text.
    ``vector`` is what was asked for by ``pooling``, a tensor on the host.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop: str | None = None
    vector: Any = None


@dataclass(frozen=True)
class Done:
    """Every sequence of the request has finished. ``cached_tokens``: prompt tokens from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Failed:
    """The request ended early. ``kind`` is "engine", "node_lost", "timeout" or "cancelled"."""

    kind: str
    message: str


Event = Delta | Done | Failed


class Sink(Protocol):
    """Receives a request's events. Called from the engine's thread; must not block."""

    def put(self, event: Event, /) -> None: ...


# --- requests and sequences ---------------------------------------------------------------------------


@dataclass
class Request:
    """One accepted request: a prompt, ``n`` sequences to generate, and the sink of its events.

    ``deadline`` is in seconds of :func:`time.monotonic`, or None. ``client`` names whose request it is: clients take
    turns. Of the requests of one that wait, those of the lowest ``priority`` come first. ``key``: name of the API key
    that its tokens count for; "": none. ``media``: what the model's forward takes beside the tokens of a prompt with
    images. ``adapter``: name of the LoRA adapter; "": none.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    sink: Sink
    n: int = 1
    deadline: float | None = None
    client: str = ""
    priority: int = 0
    key: str = ""
    media: Mapping[str, torch.Tensor] | None = None
    adapter: str = ""
    trace: Any = None  # what its spans belong to, where there is telemetry
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
        """Whether every sequence has finished."""
        return all(sequence.phase is SequencePhase.FINISHED for sequence in self.sequences)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, over all sequences."""
        return sum(len(sequence.output) for sequence in self.sequences)


class SequencePhase(Enum):
    """The state of a sequence in the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One of the ``n`` texts that a request generates.

    ``computed`` counts the leading tokens whose keys and values are in ``kv``; the next token can be sampled when it
    equals ``len(self)``.
    """

    def __init__(self, request: Request, index: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.order = next(_order)
        self.output: list[int] = []
        self.draft: list[int] = []  # proposed tokens, verified in the next step
        self.takes_drafts = True  # until the draft model fails at it
        self.computed = 0
        self.cached_tokens = 0
        self.on_file: list[BlockFile] = []  # of the prompt's next blocks, to be read
        self.kv: SequenceKV | None = None
        self.phase = SequencePhase.WAITING
        self.in_flight = False  # a step computes it: until that has landed, it keeps its memory and is in no other
        # Each sequence has its own generator: draws of other requests must not change its own.
        self.rng = random.Random(seed * 1_000_003 + index)
        self.stream: Any = None  # OutputStream, set by the engine core
        self.grammar_state: Any = None
        self.reasoning_state: Any = None
        self.pooler: Any = None
        self.ends: frozenset[int] = frozenset()  # tokens that end the text, set by the engine core
        self.preemptions = 0
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.prompt_logprobs_sent = False
        self.started_at: float | None = None
        self.last_token_at: float | None = None

    def __len__(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the request."""
        return self.request.params

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
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


# --- observation --------------------------------------------------------------------------------------


class Observer:
    """Receives counts and timings from the engine and ignores them; subclasses record them.

    Called from the engine's thread, so methods must be quick. Times are in seconds.
    """

    def started(self, request: Request, waited: float) -> None:
        """The first step of a request begins, ``waited`` after its arrival."""

    def tokens(self, prompt: int, generated: int) -> None:
        """``prompt`` prompt tokens were computed and ``generated`` tokens sampled since the last call."""

    def first_token(self, seconds: float) -> None:
        """The first token of a request was sampled, ``seconds`` after its arrival."""

    def next_token(self, seconds: float) -> None:
        """A sequence has another token, ``seconds`` after the one before."""

    def finished(self, request: Request, outcome: str, seconds: float) -> None:
        """A request ended, ``seconds`` after its arrival. ``outcome``: "ok", or the kind of its failure."""

    def step(self, seconds: float, sequences: int) -> None:
        """A step over ``sequences`` took ``seconds``."""
