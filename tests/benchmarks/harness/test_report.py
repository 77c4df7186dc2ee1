"""Tables, limits and notes as data."""

from __future__ import annotations

import json

import pytest

from bigmodel.benchmarks.harness import Column, Limit, Report, Samples, Table, comparison_table
from bigmodel.benchmarks.harness.report import disturbances


def test_a_limit_is_kept_or_not() -> None:
    assert Limit("step", 1.03, "<=", 1.05).kept
    assert not Limit("step", 1.06, "<=", 1.05).kept
    assert Limit("rate", 0.95, ">=", 0.95).kept
    assert not Limit("bytes", 10, "==", 11, "bytes").kept


def test_a_report_keeps_its_limits_only_if_all_are_kept() -> None:
    good, bad = Limit("a", 1, "<=", 2), Limit("b", 3, "<=", 2)
    assert Report("x", "cpu", limits=[good]).kept
    assert not Report("x", "cpu", limits=[good, bad]).kept


def test_a_report_is_plain_data() -> None:
    samples = Samples()
    samples.add("a", 1.5)
    table = Table("T", [Column("name"), Column("time", "seconds")], [["a", 1.5], ["b", None]])
    report = Report("x", "cpu", {"size": 3}, [table], [Limit("l", 1, "<=", 2)], ["note"], {"run": samples})
    data = json.loads(json.dumps(report.to_data()))
    assert data["tables"][0]["rows"] == [{"name": "a", "time": 1.5}, {"name": "b", "time": None}]
    assert data["tables"][0]["units"] == {"name": "", "time": "seconds"}
    assert data["limits"][0]["kept"] is True
    assert data["samples"]["run"]["values"] == {"a": {"seconds": [1.5]}}


def test_a_comparison_puts_the_best_first_and_compares_with_the_baseline() -> None:
    samples = Samples()
    for variant, values in {"slow": [4.0, 4.0], "fast": [2.0, 2.0]}.items():
        for value in values:
            samples.add(variant, {"seconds": value, "rate": 1 / value})
    by_time = comparison_table("T", samples, "fast", extra=[(Column("name again"), lambda name: name.upper())])
    assert [row[0] for row in by_time.rows] == ["fast", "slow"]
    assert by_time.records()[1]["over fast"] == 2.0
    assert by_time.records()[1]["name again"] == "SLOW"
    by_rate = comparison_table("T", samples, "fast", "rate", "rate")
    assert [row[0] for row in by_rate.rows] == ["fast", "slow"]


@pytest.mark.parametrize(("shares", "disturbed", "notes"), [([0.0], 0, 0), ([0.0], 2, 1), ([0.5], 2, 2)])
def test_what_disturbed_the_measurement_is_said(shares: list[float], disturbed: int, notes: int) -> None:
    samples = Samples(neighbours=shares, disturbed=disturbed)
    assert len(disturbances(Report("x", "cpu", samples={"run": samples}))) == notes
