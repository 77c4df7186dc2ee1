"""Branch and bound against an exhaustive search."""

from __future__ import annotations

import itertools

from bigmodel.devices import HOST
from bigmodel.plan.search.branch_and_bound import BranchAndBound
from bigmodel.plan.search.filling import options_of
from bigmodel.plan.search.items import Capacity, GroupPlacement

from .groups import group, placement_of

ITEMS = [group(30 + 7 * number) for number in range(5)]
CAPACITY = Capacity({0: 150, HOST: 1000}, slots=1)


def seconds(placement: GroupPlacement) -> float:
    """Streamed groups take seconds in proportion to their bytes, later ones more."""
    return sum(
        item.weights * (number + 1)
        for number, (item, storage) in enumerate(zip(ITEMS, placement.storage, strict=True))
        if storage != 0
    )


def test_branch_and_bound_finds_the_optimum_of_an_exhaustive_search() -> None:
    placements = (
        placement_of(ITEMS, CAPACITY, chosen) for chosen in itertools.product(*(options_of(i, CAPACITY) for i in ITEMS))
    )
    best = min((placement for placement in placements if placement is not None), key=seconds)
    found = BranchAndBound(ITEMS, CAPACITY, seconds, lambda _item, _option: [(0.0, 0.0)], None, float("inf")).run()
    assert found is not None
    assert seconds(found) == seconds(best)


def test_the_known_placement_is_returned_if_none_is_better() -> None:
    known = GroupPlacement((0,) * 5, (0,) * 5, 0)
    assert BranchAndBound(ITEMS, CAPACITY, seconds, lambda _item, _option: [(0.0, 0.0)], known, 0.0).run() is known
