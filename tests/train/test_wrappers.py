"""Compiling whole models or repeated blocks, and removing wrappers in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.train import Accelerator, TorchDynamoPlugin
from bigmodel.train.precision.mixed import MixedPrecisionForward
from bigmodel.train.wrappers import bare_model, compile_model, compile_regions, uncompiled


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


@pytest.mark.slow
def test_the_accelerator_compiles_what_it_prepares_and_gives_it_back() -> None:
    model = nn.Linear(2, 2)
    accelerator = Accelerator(dynamo_backend="eager")
    prepared = accelerator.prepare(model)
    assert prepared._orig_mod is model
    assert torch.equal(prepared(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, Wrapper) else model  # type: ignore[return-value]


@pytest.mark.parametrize("outside", [True, False])
def test_compilation_stays_or_goes(outside: bool) -> None:
    def wrapped(model: nn.Module) -> nn.Module:
        compile_ = lambda module: torch.compile(module, backend="eager")  # noqa: E731
        return compile_(Wrapper(model)) if outside else Wrapper(compile_(model))

    model = nn.Linear(1, 1)
    assert bare_model(wrapped(model), unwrap, keep_torch_compile=False) is model
    assert bare_model(wrapped(model), unwrap)._orig_mod is model


def test_the_plain_forward_comes_back_only_when_asked_for() -> None:
    model = nn.Linear(1, 1)
    MixedPrecisionForward.install(model, "bf16", torch.device("cpu"))
    assert isinstance(bare_model(Wrapper(model), unwrap).forward, MixedPrecisionForward)
    assert "forward" not in vars(bare_model(Wrapper(model), unwrap, keep_fp32_wrapper=False))


def test_unwrapping_leaves_the_prepared_model_as_it_is() -> None:
    class Doubling(Wrapper):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x) * 2

    inner = nn.Linear(2, 2)
    wrapped = Doubling(inner)
    prepared = torch.compile(wrapped, backend="eager")
    bare = bare_model(prepared, unwrap)
    assert uncompiled(prepared) is wrapped
    assert uncompiled(bare) is inner
    x = torch.ones(1, 2)
    assert torch.equal(bare(x), inner(x))
    assert torch.equal(prepared(x), inner(x) * 2)
