from __future__ import annotations

import pytest

from bigmodel.errors import BudgetError
from bigmodel.plan.memory.shortage import budget_error, smallest_budget


def fits(budgets: object) -> bool:
    return budgets[0] + budgets["cpu"] >= 100 and budgets[0] >= 10  # type: ignore[index]


def test_the_smallest_budget_of_one_device() -> None:
    assert smallest_budget({0: 20, "cpu": 30}, 0, 1000, fits) == 70
    assert smallest_budget({0: 20, "cpu": 30}, "cpu", 1000, fits) == 80
    assert smallest_budget({0: 5, "cpu": 30}, "cpu", 1000, fits) is None


def test_the_error_names_every_single_budget_that_would_do() -> None:
    error = budget_error({0: 5, "cpu": 30}, 1000, fits)
    assert isinstance(error, BudgetError)
    assert "0: 70 B (70 bytes, 65 B more)" in str(error)
    assert "'cpu': " not in str(error).split("would do")[1]


def test_when_no_single_budget_will_do_it_says_so() -> None:
    with pytest.raises(BudgetError, match="raise several"):
        raise budget_error({0: 5, "cpu": 30}, 1000, lambda budgets: False)
