"""Calls of a language model that take more than its plan says: larger ones, and those that return more.

A plan counts what `generate` runs: forwards of at most the planned tokens, whose prompt gives the scores of its last
token alone. A plain forward gives those of all tokens, and with labels a loss besides. Such a call is measured as it
runs (`TransformBudgets`), until one of its kind and size has kept to the budgets. Those that record gradients are not:
what these take until their backward is planned by `plan_training`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...plan import Plan

TOKENS = ("input_ids", "inputs_embeds")
KEPT = "logits_to_keep"
LABELS = "labels"
CACHES = "use_cache"


class Kind(NamedTuple):
    """What a call computes beside a planned one."""

    loss: bool
    all_scores: bool
    no_cache: bool


class UnplannedCalls:
    """Tells which calls of one model are to be measured.

    Args:
        plan: Its plan, of a context of tokens.
        signature: The signature of its forward.
    """

    def __init__(self, plan: Plan, signature: inspect.Signature) -> None:
        self._planned = plan.batch_size * plan.context_length
        self._keeps_last = plan.new_tokens != 0 and KEPT in signature.parameters
        self._first = next(iter(signature.parameters), None)
        self._fitted: dict[Kind, int] = {}

    def size_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, int] | None:
        """Return the kind and the tokens of a call that is to be measured; None: it is planned, or one like it fits."""
        if torch.is_grad_enabled():
            return None
        found = self._beyond(args, kwargs)
        return None if found is None or found[1] <= self._fitted.get(found[0], 0) else found

    def is_beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call takes more than its plan says, also if one like it fits."""
        return self._beyond(args, kwargs) is not None

    def _beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, int] | None:
        """Return the kind and the tokens of a call that is beyond the plan; None of others."""
        texts = args[:1] if args and self._first in TOKENS else tuple(map(kwargs.get, TOKENS))
        text = next((each for each in texts if isinstance(each, torch.Tensor) and each.dim() >= 2), None)
        if text is None:
            return None
        tokens = text.shape[0] * text.shape[1]
        kept = kwargs.get(KEPT)
        keeps_all = kept is None or (isinstance(kept, int) and kept == 0)
        kind = Kind(
            loss=kwargs.get(LABELS) is not None,
            all_scores=self._keeps_last and text.shape[1] > 1 and keeps_all,
            no_cache=kwargs.get(CACHES) is False,
        )
        return (kind, tokens) if kind.loss or kind.all_scores or tokens > self._planned else None

    def fits(self, size: tuple[Kind, int]) -> None:
        """Note that a call has kept to the budgets."""
        kind, tokens = size
        self._fitted[kind] = max(tokens, self._fitted.get(kind, 0))


def of_plan(plan: Plan, forward: Callable[..., Any]) -> UnplannedCalls | None:
    """Return what tells the unplanned calls of a model with this forward; None if its plan is of no text."""
    return UnplannedCalls(plan, inspect.signature(forward)) if plan.context_length and not plan.guarded else None
