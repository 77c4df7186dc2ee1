"""The workload that memory and time are predicted for: batch size, context length, new tokens, kind of cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...arguments import check_choice, check_flags, optional_whole_number, whole_number
from ...errors import PlanError

MOST_TOKENS = 2**25
"""Tokens of all sequences together, at most: a dry run has their ids, masks and positions as real tensors, which take
up to 300 bytes a token."""


@dataclass(frozen=True)
class Workload:
    """The shapes that memory and time are predicted for.

    Attributes:
        batch_size: sequences (or samples) at once.
        context_length: tokens of one sequence at its end: prompt and new tokens together.
        new_tokens: number of these that are generated; 0 for a model that does not generate. None: any number, so that
            prompts up to the whole context are planned for, and steps up to its last token.
        cache: kind of KV cache: "dynamic", "static", or None for a forward without cache.
        all_logits: the prefill returns logits for every token, as a plain `model(input_ids)` does; in generation only
            those of the last.
        padded: sequences may be padded, so that the model gets a mask and may take more memory; False: none ever is.
        prefill_chunk_size: tokens of each forward over a longer prompt, as `generate` of transformers takes it; None:
            a prompt is one forward.
    """

    batch_size: int = 1
    context_length: int = 0
    new_tokens: int | None = 0
    cache: str | None = "dynamic"
    all_logits: bool = False
    padded: bool = True
    prefill_chunk_size: int | None = None

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, least=1)
        whole_number("context_length", self.context_length)
        new_tokens = optional_whole_number("new_tokens", self.new_tokens)
        if new_tokens is not None and new_tokens > self.context_length:
            raise PlanError(
                f"new_tokens is {self.new_tokens}; it is part of context_length, which is {self.context_length}"
            )
        tokens = self.batch_size * self.context_length
        if tokens > MOST_TOKENS:
            raise PlanError(
                f"batch_size {self.batch_size} and context_length {self.context_length} are {tokens} tokens at once; "
                f"inference is planned for at most {MOST_TOKENS}: give a smaller batch or context"
            )
        check_choice("cache", self.cache, ("dynamic", "static", None))
        optional_whole_number("prefill_chunk_size", self.prefill_chunk_size, least=1)
        check_flags(all_logits=self.all_logits, padded=self.padded)

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        return self.context_length - (self.new_tokens or 0)

    def forwards_of_prompt(self, tokens: int) -> int:
        """Return how many forwards of `tokens` tokens a prompt is run in."""
        in_chunks = self.prefill_chunk_size is not None and tokens == self.prefill_chunk_size
        return -(-self.prompt_length // tokens) if in_chunks else 1


DEFAULT_CONTEXT = 2048
"""Default tokens of a sequence, if the model allows as many."""


def text_config(config: Any) -> Any:
    """Return the part of a transformers config that describes the language model; of several, the decoder's."""
    try:
        return config.get_text_config()
    except ValueError:  # a text encoder and a decoder
        return config.get_text_config(decoder=True)


def max_context(model: nn.Module) -> int | None:
    """Return the tokens a transformers model allows in one sequence; None if it does not say."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    text = text_config(config)
    limits = (getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def used_length(model: nn.Module, wanted: int | None) -> int:
    """Return the tokens of a sequence in inference: `wanted`, else a default; 0 for a model without a config.

    Raises:
        PlanError: the model allows fewer.
    """
    if wanted is None and getattr(model, "config", None) is None:
        return 0
    return trained_length(model, wanted)


def trained_length(model: nn.Module, wanted: int | None) -> int:
    """Return the tokens of a sequence in training: `wanted`, else a default.

    Raises:
        PlanError: the model allows fewer.
    """
    limit = max_context(model)
    if wanted is None:
        return min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    if limit is not None and wanted > limit:
        raise PlanError(
            f"context_length is {wanted}, but {type(model).__name__} allows {limit} tokens; give at most {limit}"
        )
    return wanted
