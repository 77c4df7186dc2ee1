"""bigmodel in accelerate's place under transformers, beside accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, limit, rows


@pytest.mark.slow
def test_steps_loads_and_imports_are_measured_and_tokens_are_equal(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(["stand_in"], workdir, capsys)
    assert [{row["variant"] for row in rows(found, table)} for table in range(3)] == [{"bigmodel", "accelerate"}] * 3
    assert limit(found, "both give the same tokens")["kept"]
    assert limit(found, "times faster than with accelerate")["bound"] == 3
