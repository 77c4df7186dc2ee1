"""Which modules may write through ``.data``, and checksums that show whether one did."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers import LlamaConfig, LlamaModel

from bigmodel.dispatch.weights.data_use import checksums, uses_data

from . import halving


def renormalise(module: nn.Linear) -> None:
    module.weight.data.mul_(0.5)


class Says(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight * 2
        return super().forward(input)


class SaysInAMethod(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.shrink()
        return super().forward(input)

    @torch.no_grad()
    def shrink(self) -> None:
        self.weight.data.mul_(0.5)


class SaysInAFunction(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        renormalise(self)
        return super().forward(input)


class SaysInAnotherFile(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        halving.halve(self)
        return super().forward(input)


class SaysInAnImport(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        from .halving import halve

        halve(self)
        return super().forward(input)


class SaysInAnObject(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.halving = halving.Halving()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.halving.apply_to(self)
        return super().forward(input)


class SaysInAChild(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(Halved(inputs, outputs), Halved(outputs, outputs))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self[1].halved()
        return super().forward(input)  # type: ignore[no-any-return]


class Halved(nn.Linear):
    def halved(self) -> None:
        self.weight.data.mul_(0.5)


class SaysElsewhere(nn.Linear):
    def start(self) -> None:
        self.weight.data.zero_()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        data = super().forward(input)
        return data * 2


CALLING: list[Any] = [
    Says,
    SaysInAMethod,
    SaysInAFunction,
    SaysInAnotherFile,
    SaysInAnImport,
    SaysInAnObject,
    SaysInAChild,
]


@pytest.mark.parametrize("kind", CALLING)
def test_a_forward_that_says_data_itself_or_in_what_it_calls_may_write_so(kind: type[nn.Module]) -> None:
    assert uses_data(kind(2, 2))
    assert uses_data(nn.Sequential(nn.Linear(2, 2), kind(2, 2)))


def test_functions_and_hooks_of_a_single_module_count_too() -> None:
    hooked, holding = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_pre_hook(lambda module, args: renormalise(module))
    holding.shrink = renormalise  # type: ignore[assignment]
    assert uses_data(hooked)
    assert uses_data(holding)


def test_other_modules_pay_nothing() -> None:
    assert not uses_data(SaysElsewhere(2, 2))
    assert not uses_data(nn.TransformerEncoderLayer(4, 2, 4))
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    assert not uses_data(LlamaModel(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_checksums_differ_after_a_write_that_no_version_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(7).to(dtype)
    before = checksums([tensor])
    assert checksums([tensor]) == before
    tensor.data[3] += 1
    assert checksums([tensor]) != before
    tensor.data[3] -= 1
    assert checksums([tensor]) == before
    tensor.data.copy_(tensor.flip(0))
    assert checksums([tensor]) != before
    tensor = torch.arange(7).to(dtype)
    before = checksums([tensor])
    tensor.data = tensor.clone()
    assert checksums([tensor]) != before


def test_a_module_with_a_class_of_its_own_is_not_kept_alive() -> None:
    module = spectral_norm(nn.Linear(2, 2))
    assert not uses_data(module)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
