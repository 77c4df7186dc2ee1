from __future__ import annotations

from bigmodel.plan.time.input_transfers import Crossings, Inputs
from bigmodel.profile.trace.trace import OUTSIDE, Allocate, Enter, Held, Leave, Trace

MASK, ROTATION, HIDDEN, CACHE = 0, 1, 2, 3
TRACE = Trace(
    (
        Allocate(MASK, 5),
        Enter(0, ((MASK, 5),)),
        Allocate(ROTATION, 10),
        Leave(0),
        Enter(1, ((MASK, 5), (ROTATION, 10))),
        Allocate(HIDDEN, 100),
        Leave(1, ((HIDDEN, 100),)),
        Enter(2, ((HIDDEN, 100), (ROTATION, 10), (CACHE, 7))),
        Leave(2),
    ),
    (Held(CACHE, 7, 1),),
)
"""Unit 1 gives back what it returns, and keeps a cache; it and unit 2 are called with what others made."""


def test_on_one_device_nothing_crosses() -> None:
    crossings = Crossings(TRACE)
    assert [crossings.from_elsewhere(unit, (0, 0, 0), 0) for unit in range(3)] == [[], [], []]


def test_each_unit_has_what_lies_elsewhere_brought_every_time() -> None:
    found = Crossings(TRACE).from_elsewhere(1, (0, "cpu", "cpu"), 0)
    assert found == [(0, Inputs(OUTSIDE, 1, 5)), (0, Inputs(maker=0, tensors=1, nbytes=10))]


def test_what_the_host_gives_back_lies_on_the_main_device() -> None:
    crossings = Crossings(TRACE)
    assert crossings.from_elsewhere(2, ("cpu", "cpu", "cpu"), 0) == [(0, Inputs(1, 1, 100, given_back=True))]
    assert crossings.from_elsewhere(2, ("cpu", "cpu", "cpu"), "cpu") == []


def test_what_is_made_between_units_lies_where_what_it_was_made_of_does() -> None:
    trace = Trace((Enter(0), Allocate(0, 4), Leave(0), Allocate(1, 8, source=0), Enter(1, ((1, 8),)), Leave(1)))
    assert Crossings(trace).from_elsewhere(1, (1, 0), 0) == [(1, Inputs(maker=0, tensors=1, nbytes=8))]
