"""Calls of a model that take more than its plan says: larger ones, and those that return more.

Of a language model a plan counts what `generate` runs: forwards of at most the planned tokens, whose prompt gives the
scores of its last token alone, with keys and values of at most the planned tokens. A plain forward gives the scores of
all tokens, with labels a loss besides, and hidden states or attentions if these are asked for. Beams and sequences that
are returned together have keys and values each. Of any other model it counts forwards of the inputs that it was made
with (`Plan.inputs`): larger ones, further ones and flags that these lack are beyond it.

Such a call is measured as it runs (`TransformBudgets`), until one of its kind and size has kept to the budgets. So is a
call of a part of the model by itself: with more tokens than planned, or without text any. Calls that record gradients
are not: what these take until their backward is planned by `plan_training`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ...devices.nested import iter_tensors
from ...plan import Plan
from ...profile.trace.inputs import LABELS, InputSizes, are_covered, input_sizes, positional_names

TOKENS = ("input_ids", "inputs_embeds")
KEPT = "logits_to_keep"
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


S = TypeVar("S")
"""What tells how large a call is."""


class MeasuredCalls(ABC, Generic[S]):
    """Tells which calls are to be measured, by the largest that have kept to the budgets.

    Attributes:
        beyond: What such calls have more of than planned, for a message.
        advice: What else to do if one has no room.
    """

    beyond: str
    advice: str

    @abstractmethod
    def _beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S | None:
        """Return the size of a call that is beyond the plan; None of others."""

    @abstractmethod
    def fits(self, size: S, factor: float = 1.0) -> None:
        """Note that a call has kept to the budgets, and left room for one that takes so many times as much."""

    @abstractmethod
    def _has_fitted(self, size: S) -> bool:
        """Whether a call of this kind that is as large has."""

    def size_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S | None:
        """Return the size of a call that is to be measured; None: it is planned, or one like it fits."""
        if torch.is_grad_enabled():
            return None
        found = self._beyond(args, kwargs)
        return None if found is None or self._has_fitted(found) else found

    def is_beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call takes more than its plan says, also if one like it fits."""
        return self._beyond(args, kwargs) is not None


class Unplanned(NamedTuple):
    """A call that is beyond the plan.

    Attributes:
        calls: What tells the calls like it.
        size: Its size.
    """

    calls: MeasuredCalls[Any]
    size: Any


class TextCalls(MeasuredCalls[Size]):
    """Of a model of text."""

    beyond = "more tokens, keys or values than planned, or other outputs (scores of all tokens, a loss, hidden states)"
    advice = "logits_to_keep=1 asks for the scores of the last token alone, and sample_inputs with labels plan a loss"

    def __init__(self) -> None:
        self._contexts: dict[tuple[Kind, int], int] = {}

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


class UnplannedCalls(TextCalls):
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
        self._names, self._inputs = positional_names(signature), plan.inputs

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
        if not (kind.loss or kind.all_scores or kind.states or context > self._planned):
            return None
        is_known = bool(self._inputs) and are_covered(input_sizes(self._names, args, kwargs), self._inputs)
        return None if is_known else Size(kind, rows * length, context)


class UnplannedPartCalls(TextCalls):
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


class UnplannedInputs(MeasuredCalls[InputSizes]):
    """Tells which calls of a model without text are to be measured, or of a part or another method by itself: those
    whose inputs none of the planned ones covers.

    Args:
        planned: Sizes of planned inputs; of a part or another method none are known.
        signature: The signature of what is called.
    """

    beyond = "larger or further inputs than planned"
    advice = "plan with sample_inputs as large as these"

    def __init__(self, planned: Collection[InputSizes], signature: inspect.Signature) -> None:
        self._planned = planned
        self._names = positional_names(signature)
        self._fitted: list[InputSizes] = []

    def fits(self, size: InputSizes, factor: float = 1.0) -> None:
        self._fitted = [size, *(other for other in self._fitted if not are_covered(other, [size]))]

    def _beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InputSizes | None:
        sizes = input_sizes(self._names, args, kwargs)
        return None if are_covered(sizes, self._planned) else sizes

    def _has_fitted(self, size: InputSizes) -> bool:
        return are_covered(size, self._fitted)


def _with_cached(cache: Any, tokens: int) -> int:
    """Return how many tokens of a sequence have keys and values after a call with so many further ones."""
    if type(cache).__module__ != CACHES_OF:
        return tokens
    if cache.is_compileable:  # memory for all that it may hold
        return max(tokens, int((getattr(cache, "get_max_length", None) or cache.get_max_cache_shape)()))
    return tokens + int(cache.get_seq_length())


def of_plan(plan: Plan, forward: Callable[..., Any]) -> MeasuredCalls[Any] | None:
    """Return what tells the unplanned calls of a model with this forward; None if the plan does not say enough."""
    signature = inspect.signature(forward)
    if plan.guarded:
        return None
    if plan.inputs and signature.parameters.keys().isdisjoint(TOKENS):
        return UnplannedInputs(plan.inputs, signature)
    return UnplannedCalls(plan, signature) if plan.context_length else None


def of_part(plan: Plan, call: Callable[..., Any]) -> MeasuredCalls[Any] | None:
    """Return what tells the unplanned calls of a part by itself, or of a method beside forward; None if the plan does
    not say enough."""
    if plan.guarded:
        return None
    if plan.inputs and not any(name in sizes for sizes in plan.inputs for name in TOKENS):
        return UnplannedInputs((), inspect.signature(call))
    return UnplannedPartCalls(plan) if plan.context_length else None
