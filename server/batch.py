"""Offline generation: many prompts through the engine, without HTTP.

Every step computes one token of every running sequence, so one fetch of a streamed block serves the whole batch.
Prompts may have any lengths; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bigmodel.dispatch import get_plan
from bigmodel.errors import ServeError
from bigmodel.server.engine.budget import EngineOptions
from bigmodel.server.engine.build import build_engine
from bigmodel.server.engine.scheduling.request import Delta, Event, Failed, Request, SamplingParams


@dataclass(frozen=True)
class Generation:
    """Generated text and tokens of one prompt, and why it ended ("stop" or "length")."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


class _Collected:
    """A sink that collects the events of one request."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.finish_reason = ""

    def put(self, event: Event, /) -> None:
        if isinstance(event, Failed):
            raise ServeError(event.message)
        if isinstance(event, Delta):
            self.text.append(event.text)
            self.tokens.extend(event.token_ids)
            self.finish_reason = event.finish_reason or self.finish_reason


def generate_batch(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    plan: Any = None,
    options: EngineOptions | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Generation]:
    """Generate a continuation of every prompt, as many at once as memory and options allow.

    Args:
        model: A causal language model, dispatched or plain.
        tokenizer: Its transformers tokenizer.
        prompts: Texts, or lists of token ids.
        params: Sampling parameters, for all prompts or one for each.
        plan: The plan that gives memory for keys and values; None for the plan that the model was dispatched by.
        options: Limits of sequences, tokens and key-value memory; None for the defaults.
        on_step: Called after each step with the number of finished prompts and of all.

    Returns:
        One `Generation` per prompt, in their order. Each has the tokens it would have if generated alone.

    Raises:
        ServeError: A prompt is empty or too long, or the numbers of prompts and params differ. Nothing is computed.
    """
    engine = build_engine(model, tokenizer, plan or get_plan(model), options or EngineOptions())
    core = engine.core
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ServeError(f"{len(prompts)} prompts but {len(each)} params; give one for all or one for each")
    ids = [core.codec.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    for number, tokens in enumerate(ids):
        _check(number, tokens, core.max_length, core.vocabulary_size)
    collected = [_Collected() for _ in prompts]
    for number, (tokens, chosen, sink) in enumerate(zip(ids, each, collected)):
        core.add(Request(str(number), tokens, chosen, sink))
    while not core.idle:
        core.step()
        if on_step is not None:
            on_step(len(prompts) - len(core.requests), len(prompts))
    return [Generation("".join(c.text), tuple(c.tokens), c.finish_reason) for c in collected]


def _check(number: int, tokens: list[int], max_length: int, vocabulary: int) -> None:
    if not tokens:
        raise ServeError(f"prompt {number} is empty; give it at least one token")
    if len(tokens) >= max_length:
        raise ServeError(f"prompt {number} has {len(tokens)} tokens; at most {max_length - 1} leave room for an answer")
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ServeError(f"prompt {number} holds token {wrong}; the model knows tokens 0 to {vocabulary - 1}")
