"""Loading: each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, limit, rows


@pytest.mark.slow
def test_all_loads_are_measured_apart_and_together(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["load"], workdir, capsys)
    assert [len(rows(found, table)) for table in range(3)] == [3, 2, 5]
    for row in rows(found, 2):
        assert row["together"] == pytest.approx(row["load"] + row["first forward"])
    assert limit(found, "times faster than accelerate")["bound"] == 10


@pytest.mark.slow
def test_loading_to_an_accelerator_is_measured_beside_a_peer(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["load", "--device", "virtual"], workdir, capsys)
    assert {row["variant"] for row in rows(found)} == {"bigmodel, accelerator", "transformers, accelerator"}
    assert all(row["rate"] > 0 for row in rows(found))
