"""The chosen batch beside fixed ones, at set speeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.batches import ACCELERATE, CHOSEN

from .answering import answer, limit, rows


@pytest.mark.long
@pytest.mark.slow
def test_the_chosen_batch_is_measured_beside_fixed_ones(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["batches"], workdir, capsys)
    assert [row["batch"] for row in rows(found)] == [CHOSEN, "fixed: 1", "fixed: 2", "fixed: 4", ACCELERATE]
    assert all(min(row[what] for what in ("sequences", "tokens per second")) > 0 for row in rows(found))
    assert all(row["predicted"] > 0 for row in rows(found)[:-1])
    assert limit(found, "over the best fixed one")["bound"] == 1.0
    assert limit(found, "error of predicted")["bound"] == 0.15
