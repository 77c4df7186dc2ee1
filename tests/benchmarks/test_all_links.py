"""Steps over one, two and four links."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, limit, rows


@pytest.mark.virtual_only("several links of a set speed")
@pytest.mark.slow
def test_each_number_of_links_is_held_against_one(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["all_links"], workdir, capsys)
    assert [row["links"] for row in rows(found)] == [1, 2, 4, 1]
    one = rows(found)[0]["step"]
    for row in rows(found):
        assert row["of the step over one link"] == pytest.approx(row["step"] / one)
    assert [limit(found, f"over {count} links")["bound"] for count in (2, 4)] == [0.53, 0.29]
    assert limit(found, "differ")["measured"] == 0
