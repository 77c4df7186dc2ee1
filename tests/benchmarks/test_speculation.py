"""The same text with each way of proposing its tokens, on a streamed dense model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.speculation import ASSISTED, TRANSFORMERS, WAYS, WITHOUT

from .answering import answer, rows


@pytest.mark.long
@pytest.mark.slow
def test_heads_and_draft_models_save_steps(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["proposed by"]: row for row in rows(answer(["speculation"], workdir, capsys))}
    assert list(found) == [*WAYS, TRANSFORMERS, ASSISTED]
    assert found[WITHOUT]["tokens of a step"] == pytest.approx(1, abs=0.05)
    assert found["MTP head, 1 token"]["tokens of a step"] > 1.8
    assert found["MTP head, 3 tokens"]["tokens of a step"] > 3
    assert 1 < found["MTP head, 3 tokens, often wrong"]["tokens of a step"] < 3.4
    assert found["draft model, 4 tokens"]["tokens of a step"] > 3.5
    assert found[TRANSFORMERS]["tokens of a step"] == 1
    assert found[ASSISTED]["tokens of a step"] == 4  # 12 tokens after the first five, in three steps
