"""Steps in flight over two stages, against one stage."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bigmodel.benchmarks import stages
from bigmodel.benchmarks.harness import BenchmarkError
from bigmodel.benchmarks.stages_forward import TOKENS
from bigmodel.benchmarks.stages_peer import NAME, PACKAGE

from .answering import answer, limit, rows


@pytest.mark.virtual_only("several accelerators of a set speed")
@pytest.mark.long
@pytest.mark.slow
def test_stages_at_once_are_held_against_one(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(PACKAGE)
    found = answer(["stages"], workdir, capsys)
    assert [row["stages"] for row in rows(found)] == [1, 2, 2]
    assert [row["steps"] for row in rows(found)] == ["one stage", "in turns", "at once"]
    at_once = rows(found)[2]
    assert at_once["sequences"] == 4
    assert 0 <= at_once["worst bubble"] < 1
    measured = limit(found, "of 2 stages")
    assert measured["bound"] == 0.85
    assert measured["measured"] == pytest.approx(at_once["of one stage's"] / 2)
    assert limit(found, "other tokens")["measured"] == 0
    forwards = rows(found, 1)
    assert [row["stages"] for row in forwards] == [1, 2, 2, 2]
    assert [row["rows"] for row in forwards] == [4] * 4
    assert forwards[2]["forward"].startswith("micro-batches of ")
    assert forwards[3]["forward"] == NAME
    for each in forwards[2:]:
        assert each["of one stage's"] < 1.1 * each["at most"] <= 1.1 * each["stages"]
    assert limit(found, "other logits")["measured"] == 0
    over = limit(found, f"over {NAME}")
    assert over["bound"] == stages.OVER_PEER
    assert over["measured"] == pytest.approx(forwards[3]["of one stage's"] / forwards[2]["of one stage's"])


@pytest.mark.virtual_only("several accelerators of a set speed")
@pytest.mark.long
@pytest.mark.slow
def test_a_peer_that_computes_something_else_is_refused(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(PACKAGE)

    class Zeros:
        def forward(self, rows: int) -> None:
            self.rows = rows

        def logits(self) -> torch.Tensor:
            return torch.zeros(self.rows, TOKENS, 64)

    monkeypatch.setattr(stages, "stages_of_accelerate", lambda *given: nullcontext(Zeros()))
    given = {"workdir": workdir, "quick": True, "device": "virtual", "threads": 1, "no_peers": False}
    with pytest.raises(BenchmarkError, match=f"{NAME} over 2 stages computes other logits"):
        stages.run(argparse.Namespace(**given, rounds=1, seed=0, tokens=4))
