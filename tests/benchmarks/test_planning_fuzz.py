from __future__ import annotations

import pytest

from bigmodel.benchmarks.fuzz_cases import (
    ABOVE,
    BELOW,
    EXACT,
    FAILED,
    OUTCOMES,
    REFUSED,
    STREAMED,
    VIOLATED,
    Outcome,
    fuzz,
    planned,
)
from bigmodel.benchmarks.planning_fuzz import Worker, report
from bigmodel.devices import virtual

from .test_fuzz_cases import SMALL


@pytest.mark.slow
def test_one_process_runs_all_cases_and_another_takes_over_when_it_dies() -> None:
    virtual.enable(2)
    one, other = SMALL
    plans = {number: planned(number, seed=0) for number in SMALL}
    with Worker() as worker:
        assert worker.run(one, 0, plans[one]) == fuzz(one, 0, plans[one])
        assert worker.run(one, 0, "no plan").kind == FAILED
        assert worker.run(other, 0, plans[other]) == fuzz(other, 0, plans[other])


def test_one_budget_passed_is_a_limit_missed() -> None:
    good, bad = Outcome(EXACT, {"slots": "1"}), Outcome(VIOLATED, {"slots": "2"}, "case 1: ...")
    assert report("virtual", False, [good, good]).kept
    missed = report("virtual", False, [good, bad])
    assert not missed.kept
    assert [row[1] for row in missed.tables[0].rows] == [1 if name in (EXACT, VIOLATED) else 0 for name in OUTCOMES]
    assert "case 1" in missed.notes[0]


def test_cases_are_counted_by_the_value_of_each_dimension() -> None:
    kinds = [STREAMED, BELOW, ABOVE]
    found = [*(Outcome(kind, {"slots": "1"}) for kind in kinds), Outcome(REFUSED, {"slots": "2"})]
    rows = report("virtual", True, found).tables[1].rows
    assert rows == [["slots", "1", 3, 2, 1, 1, 1, 0], ["slots", "2", 0, 0, 0, 0, 0, 0]]
