"""Threads that share a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.benchmarks.threads import WIDTH, repeated_forwards

from .answering import answer, rows


@pytest.mark.long
@pytest.mark.slow
def test_every_output_of_ours_is_right(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["threads", "--callers", "4"], workdir, capsys)
    ours = [row for row in rows(found) if row["model"].startswith("bigmodel")]
    assert len(ours) == 4
    assert all((row["right"], row["wrong"], row["raised"]) == (4 * 8, 0, 0) for row in ours)


def test_wrong_outputs_and_errors_are_counted() -> None:
    class Unreliable(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls % 3 == 0:
                raise RuntimeError("out of luck")
            return x + (self.calls % 3 == 2)

    counts = {"right": 0, "wrong": 0, "raised": 0}
    repeated_forwards(Unreliable(), nn.Identity(), "cpu", callers=1, forwards=9, counts=counts)()
    assert counts == {"right": 3, "wrong": 3, "raised": 3}
    assert WIDTH > 0


def test_a_model_is_run_for_the_given_seconds_only() -> None:
    counts = {"right": 0, "wrong": 0, "raised": 0}
    repeated_forwards(nn.Identity(), nn.Identity(), "cpu", callers=2, forwards=10**9, counts=counts, limit=0.01)()
    assert counts["wrong"] == counts["raised"] == 0
