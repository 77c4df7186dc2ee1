"""Quantised weights over a slow link."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marks import needs

from .answering import answer, limit, rows

pytestmark = needs("torchao")


@pytest.mark.slow
def test_bytes_moved_and_errors_stand_beside_the_speed(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["quantized", "--link", "0.5"], workdir, capsys)
    exact, int8, int4, small = rows(found)
    assert [row["weights"] for row in (exact, int8, int4, small)] == ["float32", "int8", "int4", "float32, small"]
    assert small["bytes moved"] == pytest.approx(int4["bytes moved"], rel=0.05)
    assert exact["bytes moved"] == 4 * 4 * 256**2
    assert int8["bytes moved"] == exact["bytes moved"] * (1 + 4 / 128) / 4
    assert int4["bytes moved"] == exact["bytes moved"] * (0.5 + 5 / 128) / 4
    assert exact["outputs' error"] == 0 < int8["weights' error"] < int4["weights' error"] < 0.1
    assert limit(found, "slowest link")["bound"] == 1.1
