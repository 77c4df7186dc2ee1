"""Experts are counted by what routers choose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.benchmarks.experts import ACCELERATE, LAYERS, ROOMY, TIGHT, counting_choices

from .answering import answer, limit, rows


@pytest.mark.long
@pytest.mark.slow
def test_bytes_fetched_are_those_of_chosen_experts(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["experts"], workdir, capsys)
    assert {row["variant"] for row in rows(found)} == {ROOMY, TIGHT, LAYERS, ACCELERATE}
    for way in (ROOMY, TIGHT):
        assert limit(found, f"{way}: bytes fetched beyond")["kept"]
    assert all(row["fetched"] == (row["chosen"] - row["hits"]) * row["expert"] for row in rows(found, 1))
    assert sum(row["fetched"] for row in rows(found, 1)) > 0


def test_routers_are_heard_while_listened_to() -> None:
    class Router(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, torch.tensor([[1, 5], [5, 7]])

    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": Router()})})
    heard: list[int] = []
    with counting_choices(model, heard.append):
        model["mlp"]["gate"](torch.ones(1))
    model["mlp"]["gate"](torch.ones(1))
    assert heard == [3]
