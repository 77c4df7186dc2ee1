"""Steps in flight over two stages, against one stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, limit, rows


@pytest.mark.virtual_only("several accelerators of a set speed")
@pytest.mark.long
@pytest.mark.slow
def test_stages_at_once_are_held_against_one(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["stages"], workdir, capsys)
    assert [row["stages"] for row in rows(found)] == [1, 2, 2]
    assert [row["steps"] for row in rows(found)] == ["one stage", "in turns", "at once"]
    at_once = rows(found)[2]
    assert at_once["sequences"] == 4
    assert 0 <= at_once["worst bubble"] < 1
    measured = limit(found, "of 2 stages")
    assert measured["bound"] == 0.85
    assert measured["measured"] == pytest.approx(at_once["of one stage's"] / 2)
    assert limit(found, "other tokens")["measured"] == 0
    forwards = rows(found, 1)
    assert [row["stages"] for row in forwards] == [1, 2, 2]
    assert [row["rows"] for row in forwards] == [4] * 3
    each = forwards[2]
    assert each["forward"].startswith("micro-batches of ")
    assert each["of one stage's"] < 1.1 * each["at most"] <= 1.1 * each["stages"]
    assert limit(found, "other logits")["measured"] == 0
