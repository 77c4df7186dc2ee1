"""Cold runs: raw readers and models read the same cold files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bigmodel.benchmarks.harness.rawread import READERS

from .answering import answer, limit, rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: mincore and posix_fadvise")


@pytest.mark.slow
def test_raw_readers_and_models_are_measured_side_by_side(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["cold"], workdir, capsys)
    names = {row["variant"] for row in rows(found)}
    assert set(READERS) < names
    assert len(names) == 10
    best = max((row for row in rows(found) if row["variant"] in READERS), key=lambda row: float(row["median"]))
    assert best["variant"] in limit(found, "best raw reader")["what"]
