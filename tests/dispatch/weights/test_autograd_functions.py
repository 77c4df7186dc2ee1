"""Functions of autograd compute with weights that are offloaded, or on another device, as other operations do."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, undispatch
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory

from ...accelerators import at, exact, two

pytestmark = pytest.mark.usefixtures("every_accelerator")

WIDTH = 8
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))


class Product(torch.autograd.Function):
    """Its backward computes with what its forward was given, and returns gradients where it computes them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


HELD = Product.apply  # before any model is dispatched, as some libraries have it
IS_FOLLOWED = isinstance(vars(torch.autograd.Function)["apply"], classmethod)


class Reading(nn.Module):
    """Hands a weight of a part to a function of autograd."""

    def __init__(self, held: bool = False) -> None:
        super().__init__()
        self.held = held
        self.first = nn.Linear(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = HELD if self.held else Product.apply
        found: torch.Tensor = self.last(product(self.first(x), self.read.weight))
        return found


WHERE: dict[str, Any] = {
    "RAM": {"device_map": {"": "cpu"}, "main_device": 0},
    "disk": {"device_map": {"": "disk"}, "main_device": 0},
    "host beside an accelerator": {"device_map": {"": "cpu"}, "main_device": 0, "offload": "compute"},
    "two accelerators": {"device_map": {"first": 0, "read": 1, "last": 1}},
}
PLACES = [pytest.param(name, marks=two) if name.startswith("two") else name for name in WHERE]


def reading(held: bool = False) -> Reading:
    torch.manual_seed(0)
    return Reading(held)


held = pytest.param(
    True,
    marks=pytest.mark.skipif(not IS_FOLLOWED, reason="needs PyTorch before 2.14: later, apply is built in"),
)


@pytest.mark.parametrize("held", [False, held], ids=["looked up", "held"])
@pytest.mark.parametrize("where", PLACES)
def test_a_function_gives_weights_of_other_parts_their_gradients(where: str, held: bool, tmp_path: Path) -> None:
    model = reading(held)
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, offload_dir=tmp_path, **WHERE[where])
    expected, found = resident(X.to(at(0))), model(X)
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)
    expected.square().sum().backward()
    found.square().sum().backward()
    for (name, kept), whole in zip(model.named_parameters(), resident.parameters(), strict=True):
        if whole.grad is not None:
            assert kept.grad is not None, name
            assert kept.grad.device == kept.device
            torch.testing.assert_close(kept.grad.cpu(), whole.grad.cpu(), rtol=1e-5, atol=1e-6, msg=name)
    assert model.read.weight.grad is not None


@pytest.mark.parametrize("where", PLACES)
def test_without_gradients_outputs_are_those_of_the_whole_model(where: str, tmp_path: Path) -> None:
    model = reading()
    device = at(0) if WHERE[where].get("offload") is None else "cpu"
    resident = copy.deepcopy(model).to(device)
    dispatch_model(model, offload_dir=tmp_path, **WHERE[where])
    with torch.no_grad():
        torch.testing.assert_close(model(X), resident(X.to(device)).cpu(), rtol=0, atol=0 if device != "cpu" else 1e-6)


@exact
def test_blocks_that_are_trained_bring_no_weights_beside_their_slots() -> None:
    peaks = []
    for mode in (torch.no_grad(), torch.enable_grad()):
        model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), torch.randn(2, 256)
        dispatch_model(model, {"": "cpu"}, main_device=0)
        before = memory_allocated(0)
        reset_peak_memory(0)
        with mode:
            model(x)
        peaks.append(max_memory_allocated(0) - before)
        undispatch(model)
    assert peaks[1] <= peaks[0] + 6 * x.nbytes


def test_functions_are_as_before_after_the_last_model() -> None:
    gc.collect()  # models of other tests
    before = [dict(vars(kind)) for kind in Product.__mro__[:3]]
    models = [dispatch_model(reading(), {"": "cpu"}, main_device=0) for _ in range(2)]
    undispatch(models.pop())
    models.clear()  # without being undispatched
    gc.collect()
    assert [dict(vars(kind)) for kind in Product.__mro__[:3]] == before
    dispatch_model(reading(), {"": 0})  # has no weight that would have to be copied
    assert [dict(vars(kind)) for kind in Product.__mro__[:3]] == before
