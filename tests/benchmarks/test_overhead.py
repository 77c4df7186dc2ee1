"""Overhead per block: on the host and on an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, limit, rows


@pytest.mark.slow
def test_overhead_is_what_is_left_of_the_difference(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["overhead", "--blocks", "6"], workdir, capsys)
    host, there = rows(found)
    assert host["overhead per block"] == pytest.approx((host["streamed"] - host["plain"]) / 6)
    copies = next(row["median"] for row in rows(found, 2) if row["variant"] == "copies alone")
    assert there["overhead per block"] == pytest.approx((there["streamed"] - there["plain"] - copies) / 6)
    for where in ("host", "virtual:0"):
        assert limit(found, f"left on them, {where}")["kept"]
