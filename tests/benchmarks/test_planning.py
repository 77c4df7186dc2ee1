from __future__ import annotations

import argparse

import pytest

from bigmodel.benchmarks import planning
from bigmodel.benchmarks.planning import PlanningCase, cases, report


def finding(
    unit: str, device: str, predicted: float, measured: float, budget: float | None = None
) -> dict[str, object]:
    case = PlanningCase("llama", 1, 32, "cpu")
    error = (predicted - measured) / measured
    names = {"device": device, "what": "x", "unit": unit, "budget": budget}
    return {"case": case, "predicted": predicted, "measured": measured, "error": error, **names}


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"families": None, "budgets": None, "quick": False, "device": "cpu", "threads": 1, **given}
    )


def test_every_family_meets_every_shape_and_room() -> None:
    found = list(cases(options()))
    assert len(found) == len(planning.FAMILIES) * len(planning.SHAPES) * len(planning.BUDGETS)
    assert {case.family for case in cases(options(families="gpt2,opt"))} == {"gpt2", "opt"}


@pytest.mark.parametrize(
    ("findings", "kept"),
    [
        ([finding("seconds", "", 1.0, 1.05), finding("bytes", "virtual:0", 100, 100, 100)], True),
        ([finding("seconds", "", 1.0, 2.0), finding("bytes", "virtual:0", 100, 100, 100)], False),
        ([finding("seconds", "", 1.0, 1.0), finding("bytes", "virtual:0", 300, 100, 400)], False),
        ([finding("seconds", "", 1.0, 1.0), finding("bytes", "virtual:0", 100, 101, 100)], False),
        ([finding("seconds", "", 1.0, 1.0), finding("bytes", "cpu", 1.0e9, 1.01e9)], False),
    ],
)
def test_a_report_holds_errors_and_budgets_against_their_limits(findings: list[dict[str, object]], kept: bool) -> None:
    assert report(options(), findings).kept is kept


def test_a_report_brings_a_picture_with_every_figure() -> None:
    findings = [finding("seconds", "", 1.0, 1.0), finding("bytes", "cpu", 100.0, 101.0)]
    assert report(options(), findings).picture.count("<title>") == 2
