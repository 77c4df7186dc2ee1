"""The methods beside forward by which others compute with a module."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bigmodel.profile.model.methods import methods_of


class Coder(nn.Module):
    """Has methods of every sort."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def set_scale(self, scale: float) -> None:
        self.scale = scale

    def pieces(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x

    def extra_repr(self) -> str:
        return ""

    def requires_grad_(self, requires_grad: bool = True) -> Coder:
        return super().requires_grad_(requires_grad)  # type: ignore[return-value]


def test_public_methods_with_arguments_that_the_class_introduces_are_found() -> None:
    assert list(methods_of(Coder())) == ["encode"]


def test_a_method_of_the_instance_is_left_alone() -> None:
    coder = Coder()
    coder.__dict__["encode"] = coder.forward
    assert list(methods_of(coder)) == []


def test_containers_of_pytorch_have_none() -> None:
    assert list(methods_of(nn.ModuleList())) == list(methods_of(nn.ModuleDict())) == []
