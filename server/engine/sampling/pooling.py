"""Pooling: from the hidden states of a text to one vector, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from bigmodel.errors import ServeError

PoolingKind: TypeAlias = Literal["last", "mean", "cls", "max", "score"]
"""The state of the last or the first token, the mean or the largest values of all; or what a classifier gives."""

KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)


@dataclass(frozen=True)
class PoolingParams:
    """Settings for the vector of one text.

    Args:
        kind: How its states become one vector.
        token_types: Type of each of its tokens, for models that tell two texts apart by them.
    """

    kind: PoolingKind
    token_types: tuple[int, ...] | None = None

    @property
    def all_rows(self) -> bool:
        """Whether the states of all tokens are needed."""
        return self.kind in ("mean", "cls", "max")

    def state(self) -> Pooler:
        """The state of one text, before its first token."""
        return Pooler(self.kind)


class Pooler:
    """Pools the states of one text."""

    def __init__(self, kind: PoolingKind) -> None:
        self._kind = kind
        self._pooled: torch.Tensor | None = None
        self._rows = 0

    def add(self, rows: torch.Tensor, end: int) -> None:
        """Add states [tokens, width] of the tokens before position ``end``; a text may begin again."""
        rows = rows.float()
        begins = end == len(rows)
        before = None if begins else self._pooled
        if self._kind in ("last", "score"):
            self._pooled = rows[-1]
        elif self._kind == "cls":
            self._pooled = rows[0] if before is None else before
        elif self._kind == "max":
            most = rows.amax(dim=0)
            self._pooled = most if before is None else torch.maximum(before, most)
        else:
            total = rows.sum(dim=0)
            self._pooled = total if before is None else before + total
            self._rows = end

    def vector(self) -> torch.Tensor:
        """The vector [width], on the host. Raises ServeError where it holds what is no number."""
        assert self._pooled is not None
        vector = self._pooled / self._rows if self._kind == "mean" else self._pooled
        vector = vector.cpu()
        if not bool(vector.isfinite().all()):
            raise ServeError("the model computed states that are not numbers; its data type may be too narrow for it")
        return vector
