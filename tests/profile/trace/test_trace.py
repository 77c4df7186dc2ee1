from __future__ import annotations

from bigmodel.profile.model.experts import Choice
from bigmodel.profile.trace.trace import Allocate, Enter, Free, Held, Leave, Operation, Route, Trace
from bigmodel.profile.trace.work import Work


def test_units_in_the_order_they_first_ran() -> None:
    assert Trace((Enter(2), Leave(2), Enter(0), Leave(0), Enter(2), Leave(2))).order() == [2, 0]


def test_operations_are_the_work_of_the_unit_that_runs_them() -> None:
    inside, between = Work("product"), Work("move")
    trace = Trace((Operation(between), Enter(3), Operation(inside), Leave(3)))
    assert trace.work() == {-1: [between], 3: [inside]}


def test_what_a_unit_leaves_alive_is_its_cache() -> None:
    trace = Trace((Enter(0), Allocate(0, 10), Allocate(1, 5), Free(1), Leave(0), Allocate(2, 7)), (Held(8, 20, 0),))
    assert trace.left_alive() == {0: 30}


def test_choices_of_routers_are_told_by_unit_and_by_the_place_of_the_experts_in_it() -> None:
    choice = Choice(tokens=4, per_token=2, count=8)
    assert Trace((Enter(1), Route(0, choice), Leave(1))).choices() == {1: {0: choice}}
