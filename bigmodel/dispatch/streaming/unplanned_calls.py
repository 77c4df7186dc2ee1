"""Calls of a language model that take more than its plan says: larger ones, and those that return more.

A plan counts what `generate` runs: forwards of at most the planned tokens, whose prompt gives the scores of its last
token alone, with keys and values of at most the planned tokens. A plain forward gives the scores of all tokens, with
labels a loss besides, and hidden states or attentions if these are asked for. Beams and sequences that are returned
together have keys and values each. Such a call is measured as it runs (`TransformBudgets`), until one of its kind and
size has kept to the budgets. So is a call of a part of the model by itself, with more tokens than planned. Calls that
record gradients are not: what these take until their backward is planned by `plan_training`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...devices.nested import iter_tensors
from ...plan import Plan

TOKENS = ("input_ids", "inputs_embeds")
KEPT = "logits_to_keep"
LABELS = "labels"
CACHES = "use_cache"
CACHE = "past_key_values"
STATES = ("output_hidden_states", "output_attentions")
CACHES_OF = "transformers.cache_utils"
"""The module of caches that hold a sequence in each row: those of others may lay tokens out otherwise."""


class Kind(NamedTuple):
    """What a call computes beside a planned one."""

    loss: bool = False
    all_scores: bool = False
    no_cache: bool = False
    states: bool = False


class Size(NamedTuple):
    """What a call takes more of than planned.

    Attributes:
        kind: What it computes.
        tokens: Tokens of its input, all rows together.
        context: Tokens that have keys and values when it ends, all rows together.
    """

    kind: Kind
    tokens: int
    context: int


class MeasuredCalls(ABC):
    """Tells which calls are to be measured, by the largest that have kept to the budgets."""

    def __init__(self) -> None:
        self._contexts: dict[tuple[Kind, int], int] = {}

    @abstractmethod
    def _beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Size | None:
        """Return the size of a call that is beyond the plan; None of others."""

    def size_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Size | None:
        """Return the size of a call that is to be measured; None: it is planned, or one like it fits."""
        if torch.is_grad_enabled():
            return None
        found = self._beyond(args, kwargs)
        return None if found is None or self._has_fitted(found) else found

    def is_beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call takes more than its plan says, also if one like it fits."""
        return self._beyond(args, kwargs) is not None

    def fits(self, size: Size, factor: float = 1.0) -> None:
        """Note that a call has kept to the budgets, and left room for one with so many times its context."""
        key = size.kind, size.tokens
        self._contexts[key] = max(int(size.context * factor), self._contexts.get(key, 0))

    def _has_fitted(self, size: Size) -> bool:
        """Whether a call of this kind with as many tokens has."""
        return any(
            kind == size.kind and size.tokens <= tokens and size.context <= context
            for (kind, tokens), context in tuple(self._contexts.items())
        )


class UnplannedCalls(MeasuredCalls):
    """Tells which calls of one model are to be measured.

    Args:
        plan: Its plan, of a context of tokens.
        signature: The signature of its forward.
    """

    def __init__(self, plan: Plan, signature: inspect.Signature) -> None:
        super().__init__()
        self._planned = plan.batch_size * plan.context_length
        self._keeps_last = plan.new_tokens != 0 and KEPT in signature.parameters
        self._first = next(iter(signature.parameters), None)

    def _beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Size | None:
        texts = args[:1] if args and self._first in TOKENS else tuple(map(kwargs.get, TOKENS))
        text = next((each for each in texts if isinstance(each, torch.Tensor) and each.dim() >= 2), None)
        if text is None:
            return None
        rows, length = text.shape[:2]
        kept = kwargs.get(KEPT)
        keeps_all = kept is None or (isinstance(kept, int) and kept == 0)
        kind = Kind(
            loss=kwargs.get(LABELS) is not None,
            all_scores=self._keeps_last and length > 1 and keeps_all,
            no_cache=kwargs.get(CACHES) is False,
            states=any(kwargs.get(name) for name in STATES),
        )
        context = rows * _with_cached(kwargs.get(CACHE), length)
        if kind.loss or kind.all_scores or kind.states or context > self._planned:
            return Size(kind, rows * length, context)
        return None


class UnplannedPartCalls(MeasuredCalls):
    """Tells which calls of a part of a model by itself are to be measured: those of more tokens than planned.

    Args:
        plan: The plan of the model, of a context of tokens.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._planned = plan.batch_size * plan.context_length

    def _beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Size | None:
        text = next((each for each in iter_tensors((args, kwargs)) if each.dim() >= 2), None)
        tokens = 0 if text is None else text.shape[0] * text.shape[1]
        return Size(Kind(), tokens, tokens) if tokens > self._planned else None


def _with_cached(cache: Any, tokens: int) -> int:
    """Return how many tokens of a sequence have keys and values after a call with so many further ones."""
    if type(cache).__module__ != CACHES_OF:
        return tokens
    if cache.is_compileable:  # memory for all that it may hold
        return max(tokens, int((getattr(cache, "get_max_length", None) or cache.get_max_cache_shape)()))
    return tokens + int(cache.get_seq_length())


def of_plan(plan: Plan, forward: Callable[..., Any]) -> UnplannedCalls | None:
    """Return what tells the unplanned calls of a model with this forward; None if its plan is of no text."""
    return UnplannedCalls(plan, inspect.signature(forward)) if plan.context_length and not plan.guarded else None


def of_part(plan: Plan) -> UnplannedPartCalls | None:
    """Return what tells the unplanned calls of a part by itself; None if the plan is of no text."""
    return UnplannedPartCalls(plan) if plan.context_length and not plan.guarded else None
