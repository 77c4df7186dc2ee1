"""Texts that repeat themselves and texts that do not, with prompt lookup and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answering import answer, rows


@pytest.mark.long
@pytest.mark.slow
def test_both_texts_are_measured_with_and_without_proposals(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["text, prompt lookup"]: row for row in rows(answer(["prompt_lookup"], workdir, capsys))}
    assert list(found) == [
        f"{text}, {how}"
        for text in ("repeats itself", "drawn at random", "repeats itself, transformers")
        for how in ("without", "with")
    ]
    assert all(0.9 < row["tokens of a step"] < 10 and row["token"] > 0 for row in found.values())
