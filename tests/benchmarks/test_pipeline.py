"""Disk, link and compute at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .answering import answer, limit, rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: mincore and posix_fadvise")


@pytest.mark.slow
def test_each_step_is_held_against_the_slowest_stage(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["pipeline", "--link", "0.5"], workdir, capsys)
    (row,) = rows(found)
    alone = {name: row[f"{name} alone"] for name in ("disk", "link", "compute")}
    assert row["slowest"] == max(alone, key=lambda name: alone[name])
    assert row["step over slowest"] == pytest.approx(row["step"] / max(alone.values()))
    assert row["step over three at once"] == pytest.approx(row["step"] / row["three at once"])
    assert row["link alone"] == pytest.approx(4 * 4 * 256**2 / 0.5e9)
    assert limit(found, "max(disk, link, compute)")["bound"] == 1.1
