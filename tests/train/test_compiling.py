"""Compiling whole models, or each repeated block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.train import Accelerator, TorchDynamoPlugin
from bigmodel.train.compiling import compile_model, compile_regions


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.mixed):
            x = block(x)
        return x


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules that are compiled in place."""
    seen: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: seen.append((self, options)))
    return seen


def test_repeated_blocks_are_compiled_one_by_one(compiled: list[Any]) -> None:
    model = Deep()
    assert compile_model(model, TorchDynamoPlugin(backend="eager", use_regional_compilation=True)) is model
    assert [module for module, _ in compiled] == list(model.blocks)
    assert compiled[0][1]["backend"] == "eager"


def test_a_model_without_repeated_blocks_is_compiled_whole(compiled: list[Any]) -> None:
    model = nn.Linear(2, 2)
    assert compile_regions(model, backend="eager")._orig_mod is model
    assert compiled == []


def test_the_accelerator_compiles_what_it_prepares_and_gives_it_back() -> None:
    model = nn.Linear(2, 2)
    accelerator = Accelerator(dynamo_backend="eager")
    prepared = accelerator.prepare(model)
    assert prepared._orig_mod is model
    assert torch.equal(prepared(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
