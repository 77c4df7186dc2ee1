"""The first token after a prompt that is read from files, beside one that is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, rows


@pytest.mark.slow
def test_reading_a_prompt_is_measured_beside_computing_it(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["prefix_folder"], workdir, capsys)
    assert [row["prompt"] for row in rows(found)] == ["computed", "read from the page cache", "read from disk"]
    assert all(row["first token"] > 0 for row in rows(found))
