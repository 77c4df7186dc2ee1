from __future__ import annotations

from bigmodel.benchmarks.planning_fuzz import (
    EXACT,
    HOST_ALONE,
    NEARLY,
    OUTCOMES,
    REFUSED,
    STREAMED,
    VIOLATED,
    Outcome,
    fuzz,
    planned,
    report,
)


def outcomes(first: int, count: int) -> list[Outcome]:
    plans = planned(first, count, seed=0)
    return [Outcome(**outcome) for outcome in fuzz(first, count, 0, plans)]


def test_a_case_is_the_same_whatever_came_before_it() -> None:
    assert outcomes(first=1, count=2)[1:] == outcomes(first=2, count=1)


def test_random_models_keep_random_budgets() -> None:
    kinds = [outcome.kind for outcome in outcomes(first=0, count=6)]
    assert set(kinds) <= {EXACT, STREAMED, NEARLY, REFUSED, HOST_ALONE}


def test_one_budget_passed_is_a_limit_missed() -> None:
    good, bad = Outcome(EXACT, {"slots": "1"}), Outcome(VIOLATED, {"slots": "2"}, "case 1: ...")
    assert report("virtual", [good, good]).kept
    missed = report("virtual", [good, bad])
    assert not missed.kept
    assert [row[1] for row in missed.tables[0].rows] == [1 if name in (EXACT, VIOLATED) else 0 for name in OUTCOMES]
    assert "case 1" in missed.notes[0]


def test_cases_are_counted_by_the_value_of_each_dimension() -> None:
    found = [Outcome(STREAMED, {"slots": "1"}), Outcome(NEARLY, {"slots": "1"}), Outcome(REFUSED, {"slots": "2"})]
    assert report("virtual", found).tables[1].rows == [["slots", "1", 2, 1, 1, 0], ["slots", "2", 0, 0, 0, 0]]
