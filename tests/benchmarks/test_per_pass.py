"""Prompts streamed and steps computed on the host, at set speeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.per_pass import FORMS

from .answering import answer, limit, rows


@pytest.mark.slow
def test_each_form_is_measured_beside_its_prediction(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["per_pass"], workdir, capsys)
    assert [row["offload"] for row in rows(found)] == list(FORMS)
    for row in rows(found):
        assert min(row[what] for what in ("prompt", "prompt, predicted", "step", "step, predicted")) > 0
    assert limit(found, "the faster of the others")["bound"] == 0.9
    assert limit(found, "error of a predicted step")["bound"] == 0.2
