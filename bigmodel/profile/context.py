"""How many tokens a sequence has that is planned for."""

from __future__ import annotations

from torch import nn

from ..errors import PlanError

DEFAULT_CONTEXT = 2048
"""Tokens that are planned for when nothing is said, as far as the model allows."""


def max_context(model: nn.Module) -> int | None:
    """Return the tokens a transformers model allows in one sequence; None if it does not say."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def used_length(model: nn.Module, wanted: int | None) -> int:
    """Return the tokens of a sequence in use: those wanted, else a default; 0 for a model that has no config.

    Raises:
        PlanError: the model allows fewer.
    """
    if wanted is None and getattr(model, "config", None) is None:
        return 0
    return trained_length(model, wanted)


def trained_length(model: nn.Module, wanted: int | None) -> int:
    """Return the tokens of a sequence in training: those wanted, else a default.

    Raises:
        PlanError: the model allows fewer.
    """
    limit = max_context(model)
    if wanted is None:
        return min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    if limit is not None and wanted > limit:
        raise PlanError(
            f"context_length is {wanted}, but {type(model).__name__} allows {limit} tokens; ask for at most {limit}"
        )
    return wanted
