from __future__ import annotations

from bigmodel.benchmarks.planning_fuzz import EXACT, HOST_ALONE, NEARLY, OUTCOMES, REFUSED, STREAMED, VIOLATED, report
from bigmodel.benchmarks.planning_fuzz import fuzz as run


def test_a_case_is_the_same_whatever_came_before_it() -> None:
    assert run(first=1, count=2, seed=0)[1:] == run(first=2, count=1, seed=0)


def test_random_models_keep_random_budgets() -> None:
    outcomes = [outcome for outcome, _ in run(first=0, count=6, seed=0)]
    assert set(outcomes) <= {EXACT, STREAMED, NEARLY, REFUSED, HOST_ALONE}


def test_one_budget_passed_is_a_limit_missed() -> None:
    assert report("virtual", 2, {EXACT: 2}, []).kept
    missed = report("virtual", 2, {EXACT: 1, VIOLATED: 1}, ["case 1: ..."])
    assert not missed.kept
    assert [row[1] for row in missed.tables[0].rows] == [1 if name in (EXACT, VIOLATED) else 0 for name in OUTCOMES]
    assert "case 1" in missed.notes[0]
