"""A budget of the host's memory: what the process takes, and what it has to read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .answering import answer, limit, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: mincore and posix_fadvise"),
]


def test_the_resident_set_is_held_against_the_budget(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["budget", "--steps", "1"], workdir, capsys)
    memory = {row["what"]: row["bytes"] for row in rows(found, 1)}
    assert 0 < memory["process before loading"] <= memory["highest resident set"]
    held = limit(found, "highest resident set")
    assert held["bound"] == pytest.approx(1.05 * memory["budget"] + memory["largest block"])
    assert held["kept"]
