"""Wrappers come off in whatever order they were put on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.train.precision import MixedPrecisionForward
from bigmodel.train.unwrapping import bare_model, uncompiled


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
