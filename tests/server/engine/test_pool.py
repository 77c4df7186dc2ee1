"""The token pool and the budget it comes from."""

from __future__ import annotations

import pytest

from bigmodel.errors import ServeError
from bigmodel.server.engine.cache import GROWTH
from bigmodel.server.engine.pool import KVBudget, TokenPool


def test_the_tightest_device_decides() -> None:
    budget = KVBudget({"cuda:0": 100, "cuda:1": 10}, {"cuda:0": 100 * GROWTH * 3, "cuda:1": 10 * GROWTH * 5})
    assert budget.tokens == 3 * GROWTH


def test_a_budget_for_nothing_is_refused_with_numbers() -> None:
    with pytest.raises(ServeError, match=f"1000.*not even {GROWTH} tokens"):
        _ = KVBudget({"cpu": 100}, {"cpu": 1000}).tokens


def test_no_more_is_handed_out_than_there_is() -> None:
    pool = TokenPool(10)
    assert pool.take(6)
    assert not pool.take(5)
    assert pool.used == 6
    pool.give_back(6)
    assert pool.take(10)
    with pytest.raises(RuntimeError, match="11 positions given back, 10 held"):
        pool.give_back(11)
