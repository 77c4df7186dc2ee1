from __future__ import annotations

import pytest

from bigmodel.benchmarks.planning_fuzz import (
    ABOVE,
    BELOW,
    EXACT,
    FAILED,
    HOST_ALONE,
    OUTCOMES,
    REFUSED,
    STREAMED,
    VIOLATED,
    Outcome,
    Worker,
    fuzz,
    planned,
    report,
)
from bigmodel.devices import virtual


def outcomes(*numbers: int) -> list[Outcome]:
    virtual.enable(2)
    return [fuzz(number, 0, planned(number, seed=0)) for number in numbers]


def test_a_case_is_the_same_whatever_came_before_it() -> None:
    assert outcomes(1, 2)[1:] == outcomes(2)


@pytest.mark.slow
def test_random_models_keep_random_budgets() -> None:
    kinds = {outcome.kind for outcome in outcomes(*range(6))}
    assert kinds <= {EXACT, STREAMED, BELOW, REFUSED, HOST_ALONE}


@pytest.mark.slow
def test_one_process_runs_all_cases_and_another_takes_over_when_it_dies() -> None:
    virtual.enable(2)
    plans = [planned(number, seed=0) for number in (1, 2)]
    with Worker() as worker:
        assert worker.run(1, 0, plans[0]) == outcomes(1)[0]
        assert worker.run(1, 0, "no plan").kind == FAILED
        assert worker.run(2, 0, plans[1]) == outcomes(2)[0]


def test_one_budget_passed_is_a_limit_missed() -> None:
    good, bad = Outcome(EXACT, {"slots": "1"}), Outcome(VIOLATED, {"slots": "2"}, "case 1: ...")
    assert report("virtual", [good, good]).kept
    missed = report("virtual", [good, bad])
    assert not missed.kept
    assert [row[1] for row in missed.tables[0].rows] == [1 if name in (EXACT, VIOLATED) else 0 for name in OUTCOMES]
    assert "case 1" in missed.notes[0]


def test_cases_are_counted_by_the_value_of_each_dimension() -> None:
    kinds = [STREAMED, BELOW, ABOVE]
    found = [*(Outcome(kind, {"slots": "1"}) for kind in kinds), Outcome(REFUSED, {"slots": "2"})]
    rows = report("virtual", found).tables[1].rows
    assert rows == [["slots", "1", 3, 2, 1, 1, 1, 0], ["slots", "2", 0, 0, 0, 0, 0, 0]]
