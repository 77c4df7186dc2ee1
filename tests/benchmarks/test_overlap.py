"""The grid of compute and transfer."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, limit, rows


def test_each_cell_is_held_against_the_longer_of_both(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["overlap"], workdir, capsys)
    assert len(rows(found)) == 2
    for row in rows(found):
        longer = max(row["compute"], row["transfer"])
        assert row["step over max"] == pytest.approx(row["step"] / longer)
    assert limit(found, "max(compute, transfer)")["bound"] == 1.05
