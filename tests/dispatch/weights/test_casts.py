"""Casts that code names are found before any forward runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.weights.casts import cast_parts
from bigmodel.errors import DispatchError


class Casting(nn.Module):
    """A linear layer and a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.matrix = nn.Parameter(torch.ones(8, 8))


class ByMethod(Casting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear.half()(x.half()).to(x.dtype) @ self.matrix


class ByDtype(Casting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.to(torch.float16)
        return self.linear(x.half()).to(x.dtype) @ self.matrix


class ByKeyword(Casting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear.to(dtype=torch.float16)(x.half()).to(x.dtype) @ self.matrix


class Whole(Casting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to(torch.float16)
        return (self.linear(x.half()) @ self.matrix).to(x.dtype)


class OnlyTensors(Casting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(torch.float32)) @ self.matrix.to(torch.float32)


@pytest.mark.parametrize(
    ("kind", "name"), [(ByMethod, "0.linear"), (ByDtype, "0.linear"), (ByKeyword, "0.linear"), (Whole, "0")]
)
@pytest.mark.usefixtures("accelerators")
def test_a_cast_of_what_is_streamed_is_refused_when_the_model_is_dispatched(kind: type[nn.Module], name: str) -> None:
    model = nn.Sequential(kind(), nn.Linear(8, 8))
    assert [(cast.by, cast.name, cast.dtype) for cast in cast_parts(model)] == [("0", name, torch.float16)]
    with pytest.raises(DispatchError, match=r"the forward of '0' casts 0\.linear\.weight to float16"):
        dispatch_model(model, {"": "cpu"}, main_device=0)


def test_casts_of_tensors_are_none_of_modules() -> None:
    assert not list(cast_parts(OnlyTensors()))
