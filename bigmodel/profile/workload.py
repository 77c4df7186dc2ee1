"""The shapes a model is going to run with."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError


@dataclass(frozen=True)
class Workload:
    """What memory and time are predicted for.

    Attributes:
        batch_size: sequences (or samples) at once.
        context_length: tokens of one sequence at its end: prompt and new tokens together.
        new_tokens: how many of these are generated; for a model that does not generate, 0. None: any share of them,
            so that prompts up to the whole context are planned for, and steps up to its last token.
        cache: kind of KV cache: "dynamic", "static", or None for a forward without cache.
        all_logits: the prompt's forward returns logits for every token, as a plain `model(input_ids)` does, and
            not only for the last as in generation.
    """

    batch_size: int = 1
    context_length: int = 0
    new_tokens: int | None = 0
    cache: str | None = "dynamic"
    all_logits: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise PlanError(f"batch_size is {self.batch_size}; give at least 1")
        if self.context_length < 0:
            raise PlanError(f"context_length is {self.context_length}; give a number of tokens")
        if self.new_tokens is not None and not 0 <= self.new_tokens <= self.context_length:
            raise PlanError(
                f"new_tokens is {self.new_tokens}; it is part of context_length, which is {self.context_length}"
            )
        if self.cache not in ("dynamic", "static", None):
            raise PlanError(f"cache is {self.cache!r}; use 'dynamic', 'static' or None")

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        return self.context_length - (self.new_tokens or 0)
