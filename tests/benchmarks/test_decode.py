"""Decode steps: everybody's, and that ours compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, limit, rows


def test_all_ways_are_measured_and_ours_gives_the_same_bits(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["decode", "--steps", "1"], workdir, capsys)
    assert len(rows(found)) == 5
    assert all(row["median"] > 0 and row["runs"] == 1 for row in rows(found))
    assert limit(found, "to the bit")["kept"]
    assert limit(found, "over resident")["bound"] == 1.03


def test_peers_may_be_left_out(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["decode", "--steps", "1", "--no-peers"], workdir, capsys)
    assert not [row for row in rows(found) if row["variant"].startswith("accelerate")]
