"""Steps whose keys and values lie on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, rows


@pytest.mark.virtual_only("a link of a set speed")
@pytest.mark.long
@pytest.mark.slow
def test_a_step_is_held_against_its_bound_and_its_logits_are_equal(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(["kv_tier"], workdir, capsys)
    steps = {row["step"]: row for row in rows(found)}
    assert len(steps) == 9
    for name, row in steps.items():
        bounds = [row["bytes over the link"], row["bytes on disk"]]
        if bounds[0] is None:
            continue
        alone = steps["server, all on the accelerator" if name.startswith("server") else "all on the accelerator"]
        (held,) = (each for each in found["limits"] if each["what"].startswith(f"{name}: "))
        assert held["measured"] == pytest.approx(row["median"] / max(alone["median"], *(each or 0 for each in bounds)))
        assert held["bound"] == 1.05
    assert [each["measured"] for each in found["limits"] if "differ" in each["what"]] == [0, 0, 0, 0, 0]
