"""Ctrl-C early in a command: tracebacks are counted beside those of the smallest program."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.interrupts import MILLISECONDS, OURS, SMALLEST, Found

from .answering import answer, rows


@pytest.mark.long
@pytest.mark.slow
def test_both_programs_are_interrupted_after_each_time(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = rows(answer(["interrupts", "--tries", "1"], workdir, capsys))
    assert [row["interrupted after"] for row in shown] == list(MILLISECONDS)
    assert {row[name] for row in shown for name in (OURS, SMALLEST)} <= {0, 1}


def test_most_tries_show_no_traceback_from_a_time_on() -> None:
    found = Found()
    for ms in MILLISECONDS:
        found.tries[ms] = 4
        found.tracebacks[ms] = 4 if ms in (8, 12) else 1
    assert found.half() == 16
    found.tracebacks[MILLISECONDS[-1]] = 2
    assert found.half() == float("inf")
