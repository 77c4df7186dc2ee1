from __future__ import annotations

import itertools

from bigmodel.devices import HOST
from bigmodel.plan.search.branch_and_bound import BranchAndBound
from bigmodel.plan.search.capacity import Item, Placement, Room
from bigmodel.plan.search.feasibility import options_of, settle

ITEMS = [Item(weights=30 + 7 * number, slab=30 + 7 * number) for number in range(5)]
ROOM = Room({0: 150, HOST: 1000}, slots=1)


def seconds(placement: Placement) -> float:
    """What is streamed takes its bytes, later groups more."""
    return sum(
        item.weights * (number + 1)
        for number, (item, held) in enumerate(zip(ITEMS, placement.held, strict=True))
        if held == HOST
    )


def test_it_finds_what_trying_everything_finds() -> None:
    placements = (settle(ITEMS, ROOM, chosen) for chosen in itertools.product(*(options_of(i, ROOM) for i in ITEMS)))
    best = min((placement for placement in placements if placement is not None), key=seconds)
    found = BranchAndBound(ITEMS, ROOM, seconds, lambda _item, _option: (0.0, 0.0), None, float("inf")).run()
    assert found is not None
    assert seconds(found) == seconds(best)


def test_what_is_known_already_is_returned_if_nothing_is_better() -> None:
    known = Placement((0,) * 5, (0,) * 5, 0)
    assert BranchAndBound(ITEMS, ROOM, seconds, lambda _item, _option: (0.0, 0.0), known, 0.0).run() is known
