"""Divided experts beside streaming and computing all, over several links and two kinds of routers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.expert_split import ACCELERATE, AUTO, COMPUTE, DIVISIONS, STREAM

from .answering import answer, limit, rows


@pytest.mark.long
@pytest.mark.slow
def test_every_plan_and_division_is_measured_on_both_traces(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["expert_split"], workdir, capsys)
    assert {(row["routers"], row["fetch over compute"]) for row in rows(found)} == {("uniform", 1.0), ("local", 1.0)}
    for row in rows(found):
        assert row["best division"] <= min(row[way] for way in (STREAM, COMPUTE, AUTO))
        assert row["auto, predicted"] > 0
        assert row["accelerate, whole layers"] > 0
    assert limit(found, "auto over the best division")["bound"] == 1.1
    for samples in found["samples"].values():
        every = {STREAM, COMPUTE, ACCELERATE, *DIVISIONS}
        assert {AUTO, *every} >= set(samples["values"]) >= every
