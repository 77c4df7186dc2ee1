"""Branch and bound against an exhaustive search."""

from __future__ import annotations

import itertools

from bigmodel.devices import HOST
from bigmodel.plan.search.branch_and_bound import BranchAndBound
from bigmodel.plan.search.filling import Option, options_of
from bigmodel.plan.search.items import Capacity, GroupPlacement

from .groups import group, placement_of

ITEMS = [group(30 + 7 * number) for number in range(5)]
CAPACITY = Capacity({0: 150, HOST: 1000}, slots=1)


def seconds(placement: GroupPlacement, below: float = float("inf")) -> float:
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


def test_placements_that_cannot_be_better_are_not_evaluated() -> None:
    """Two slots leave room for six of twelve blocks: the link is busy for the other six in every placement."""
    items, capacity = [group(1)] * 12, Capacity({0: 8, HOST: 12}, slots=2)
    known = GroupPlacement((0, HOST) * 6, (0,) * 12, 0, 2, 1)
    evaluated: list[GroupPlacement] = []

    def evaluate(placement: GroupPlacement, _below: float) -> float:
        evaluated.append(placement)
        return 24.0

    def least(_index: int, option: Option) -> list[tuple[float, float]]:
        return [(1.0, 4.0 if option[0] == HOST else 0.0)]

    assert BranchAndBound(items, capacity, evaluate, least, known, 24.0).run() is known
    assert evaluated == []
    BranchAndBound(items, capacity, evaluate, least, known, 24.1).run()
    assert len(evaluated) == 1
