"""Steps whose keys and values lie on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, limit, rows


@pytest.mark.virtual_only("a link of a set speed")
@pytest.mark.slow
def test_a_step_is_held_against_its_bound_and_its_logits_are_equal(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(["kv_tier"], workdir, capsys)
    device, planned, from_disk, served, as_served, link, over, reading = (row["median"] for row in rows(found))
    held = limit(found, "larger of compute and bytes")
    assert held["measured"] == pytest.approx(planned / max(device, link))
    assert held["bound"] == 1.05
    of_disk = limit(found, "older ones on disk over")["measured"]
    assert of_disk == pytest.approx(from_disk / max(device, over, reading))
    assert limit(found, "step of the server")["measured"] == pytest.approx(as_served / max(served, link))
    assert [each["measured"] for each in found["limits"] if "differ" in each["what"]] == [0, 0, 0]
