from __future__ import annotations

import pytest

from bigmodel.errors import BudgetError, PlanError
from bigmodel.plan.memory.evaluate import device_uses, over_budget
from bigmodel.plan.search.capacity import Room
from bigmodel.plan.search.fit import checked_main, greedy_assignment
from bigmodel.profile import profile_model

from ...profile.models import tiny_llama

pytestmark = pytest.mark.usefixtures("accelerators")

PROFILE = profile_model(tiny_llama(num_hidden_layers=6), context_length=32, new_tokens=2)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 1.1])
@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
def test_what_is_filled_fits_to_the_byte(share: float, strategy: str) -> None:
    working = PROFILE.activations + sum(PROFILE.kv_cache)
    budgets = {0: int(share * PROFILE.weights) + working, 1: PROFILE.weights // 3 + working, "cpu": 10**9}
    found = greedy_assignment(PROFILE, Room(budgets, PROFILE.activations), strategy, False)
    assert not over_budget(device_uses(PROFILE, found), budgets)


def test_what_fits_nowhere_is_refused_with_budgets_that_would_do() -> None:
    with pytest.raises(BudgetError, match="would do"):
        greedy_assignment(PROFILE, Room({0: 1000, "cpu": 1000, "disk": 1000}, PROFILE.activations), "auto", False)


def test_a_main_device_needs_a_budget() -> None:
    assert checked_main("1", {1: 100}) == 1
    assert checked_main(None, {}) is None
    with pytest.raises(PlanError, match="main_device is 0"):
        checked_main(0, {1: 100})
