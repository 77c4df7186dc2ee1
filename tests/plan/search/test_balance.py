from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bigmodel.plan import balanced_caps, get_balanced_memory, infer_auto_device_map
from bigmodel.plan.search.greedy import Bin, fill_in_order

from ...profile.models import Flat, Stack, on_meta

pytestmark = pytest.mark.usefixtures("accelerators")


def test_two_devices_share_a_model_evenly() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(8)))
    budgets = get_balanced_memory(model, {0: 10_000, 1: 10_000, "cpu": 50})
    assert budgets == {0: 4 * 440, 1: 4 * 440, "cpu": 50}
    assert list(infer_auto_device_map(model, budgets, clean_result=False).values()) == [0] * 4 + [1] * 4


def test_gaps_in_device_ids_are_no_trouble() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))
    budgets = get_balanced_memory(model, {1: 10_000, 3: 10_000}, low_zero=True)
    assert budgets == {1: 0, 3: 4 * 440}


def test_unequal_devices_are_capped_by_what_they_have() -> None:
    assert balanced_caps([10] * 10, [20, 1000]) == [20, 80]


def test_low_zero_leaves_to_the_first_device_only_what_the_others_cannot_hold() -> None:
    assert balanced_caps([10] * 10, [1000, 60, 30], low_zero=True) == [10, 60, 30]


def test_a_model_that_does_not_fit_keeps_the_budgets() -> None:
    assert balanced_caps([10] * 10, [20, 30]) == [20, 30]


def test_one_large_embedding_does_not_leave_the_other_devices_empty() -> None:
    costs = [100, *[10] * 10]
    assert balanced_caps(costs, [150, 150]) == [100, 100]


def test_one_device_is_left_as_it_is() -> None:
    assert get_balanced_memory(Flat(), {0: 300, "cpu": 9}) == {0: 300, "cpu": 9}


def test_mixed_blocks_are_weighed_as_they_are() -> None:
    class Dense(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width, bias=False)

    model = nn.ModuleList([*(Dense(4) for _ in range(3)), *(Dense(64) for _ in range(3))])
    budgets = get_balanced_memory(model, {0: 10**6, 1: 10**6})
    assert max(budgets.values()) == 2 * 64 * 64 * 4


def test_ties_are_counted_once() -> None:
    model = on_meta(Stack, depth=2, tied=True)
    budgets = get_balanced_memory(model, {0: 10**6, 1: 10**6})
    assert set(infer_auto_device_map(model, budgets).values()) == {0, 1}


@given(st.lists(st.integers(1, 50), min_size=1), st.lists(st.integers(1, 400), min_size=1, max_size=4), st.booleans())
def test_what_fitted_still_fits_under_the_caps(costs: list[int], capacities: list[int], low_zero: bool) -> None:
    caps = balanced_caps(costs, capacities, low_zero)
    assert all(cap <= capacity for cap, capacity in zip(caps, capacities, strict=True))

    def passed(sizes: list[int]) -> list[int]:
        return fill_in_order(enumerate(costs), [Bin(index, size) for index, size in enumerate(sizes)])

    assert passed(caps) == passed(capacities)
