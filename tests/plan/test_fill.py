from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigmodel.plan.fill import Bin, fill_in_order


def fill(costs: list[int], capacities: list[int | None]) -> tuple[list[list[int]], list[int]]:
    bins = [Bin(index, size) for index, size in enumerate(capacities)]
    passed = fill_in_order(enumerate(costs), bins)
    return [bin_.placed for bin_ in bins], passed


def test_neighbours_stay_together() -> None:
    assert fill([4, 4, 4, 4], [8, 8]) == ([[0, 1], [2, 3]], [])


def test_a_huge_item_pushes_nothing_else_away() -> None:
    assert fill([100, 1, 1], [10, None]) == ([[], [0, 1, 2]], [])
    assert fill([100, 1, 1], [10, 5]) == ([[1, 2], []], [0])


def test_room_left_behind_gets_a_second_chance() -> None:
    assert fill([80, 5, 5, 5, 15], [16, 96]) == ([[4], [0, 1, 2, 3]], [])


@given(st.lists(st.integers(0, 50)), st.lists(st.integers(0, 100), max_size=4))
def test_no_bin_overflows_and_every_item_is_accounted_for(costs: list[int], capacities: list[int]) -> None:
    placed, passed = fill(costs, list(capacities))
    assert sorted([index for bin_ in placed for index in bin_] + passed) == list(range(len(costs)))
    for bin_, capacity in zip(placed, capacities, strict=True):
        assert sum(costs[index] for index in bin_) <= capacity
    for index in passed:
        for bin_, capacity in zip(placed, capacities, strict=True):
            assert sum(costs[i] for i in bin_) + costs[index] > capacity
