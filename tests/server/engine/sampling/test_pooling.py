"""Vectors do not depend on how a text is cut into chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bigmodel.errors import ServeError
from bigmodel.server.engine.sampling.pooling import KINDS, Pooler, PoolingKind, PoolingParams

ROWS = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
OWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda rows: rows[-1],
    "cls": lambda rows: rows[0],
    "mean": lambda rows: rows.mean(dim=0),
    "max": lambda rows: rows.amax(dim=0),
    "score": lambda rows: rows[-1],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(7,), (3, 7), (1, 2, 3, 7)])
def test_chunks_give_what_the_whole_text_gives(kind: PoolingKind, cuts: tuple[int, ...]) -> None:
    pooler = Pooler(kind)
    pooler.add(ROWS[:2] + 1, 2)  # a text that is computed again begins anew
    for begin, end in zip((0, *cuts), cuts):
        pooler.add(ROWS[begin:end], end)
    torch.testing.assert_close(pooler.vector(), OWN[kind](ROWS))


def test_which_kinds_need_all_rows() -> None:
    assert {kind for kind in KINDS if PoolingParams(kind).all_rows} == {"mean", "cls", "max"}


def test_what_is_no_number_is_an_error() -> None:
    pooler = Pooler("last")
    pooler.add(torch.tensor([[1.0, float("nan")]]), 1)
    with pytest.raises(ServeError, match="not numbers"):
        pooler.vector()
