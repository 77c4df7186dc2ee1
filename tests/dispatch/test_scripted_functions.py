"""Functions of TorchScript compute with weights that are offloaded, or on another device, as other operations do."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigmodel import dispatch_model, get_plan, undispatch
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory

from ..accelerators import at, exact, two

pytestmark = pytest.mark.usefixtures("every_accelerator")

WIDTH = 8


@torch.jit.script
def project(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.tanh(F.linear(x, weights[0], weights[1]))


@torch.jit.script
def halve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    weight.mul_(0.5)
    return x * weight


traced = torch.jit.trace(lambda x, w: x @ w, (torch.ones(2, WIDTH), torch.ones(WIDTH, WIDTH)))


class Reading(nn.Module):
    """Hands weights of its parts to functions of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.last(project(x, weights=[self.read.weight, self.read.bias]))
        found: torch.Tensor = traced(x, self.read.weight)
        return found


class Writing(Reading):
    """Hands one of them to a function that writes into it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(halve(self.first(x), self.read.bias))
        return found


class ReadingMany(nn.Module):
    """Calls none of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.read:
            x = project(x, [each.weight, each.bias])
        return x


WHERE: dict[str, Any] = {
    "RAM": {"device_map": {"": "cpu"}, "main_device": 0},
    "disk": {"device_map": {"": "disk"}, "main_device": 0},
    "host beside an accelerator": {"device_map": {"": "cpu"}, "main_device": 0, "offload": "compute"},
    "two accelerators": {"device_map": {"first": 0, "read": 1, "last": 1}},
}
PLACES = [pytest.param(name, marks=two) if name.startswith("two") else name for name in WHERE]


def reading(kind: type[Reading] = Reading) -> Reading:
    torch.manual_seed(0)
    return kind().eval()


BUDGET = 1_300_000
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("where", PLACES)
def test_scripted_functions_compute_with_weights_of_other_parts(where: str, tmp_path: Path) -> None:
    model = reading()
    device = at(0) if WHERE[where].get("offload") is None else "cpu"
    resident = copy.deepcopy(model).to(device)
    dispatch_model(model, offload_dir=tmp_path, **WHERE[where])
    with torch.no_grad():
        expected = resident(X.to(device)).cpu()
        for _ in range(2):
            torch.testing.assert_close(model(X), expected, rtol=0, atol=0 if device != "cpu" else 1e-6)


@pytest.mark.parametrize("where", PLACES)
def test_they_give_these_weights_their_gradients(where: str, tmp_path: Path) -> None:
    model = reading().train()
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, offload_dir=tmp_path, **WHERE[where])
    resident(X.to(at(0))).square().sum().backward()
    model(X).square().sum().backward()
    for (name, kept), whole in zip(model.named_parameters(), resident.parameters()):
        assert kept.grad is not None, name
        assert whole.grad is not None, name
        assert torch.allclose(kept.grad.cpu(), whole.grad.cpu(), rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("where", PLACES)
def test_what_they_write_into_weights_stays(where: str, tmp_path: Path) -> None:
    model = reading(Writing)
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, offload_dir=tmp_path, **WHERE[where])
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            expected = resident(X.to(at(0))).cpu()
            assert torch.allclose(model(X), expected, atol=1e-6)
            assert torch.equal(model.get_parameter("read.bias").cpu(), resident.read.bias.cpu())


@exact
def test_copies_that_they_compute_with_are_planned() -> None:
    model, x = ReadingMany(), torch.randn(2, 256)
    gc.collect()
    before = memory_allocated(0)
    dispatch_model(model, max_memory={0: BUDGET, "cpu": "1GB"}, sample_inputs=x)
    assert get_plan(model).streamed
    reset_peak_memory(0)
    with torch.no_grad():
        model(x)
    planned, measured = get_plan(model).devices[0].total, max_memory_allocated(0) - before
    assert 0.9 * planned <= measured <= planned <= BUDGET


def test_calls_of_scripted_functions_are_as_before_after_the_last_model() -> None:
    gc.collect()  # models of other tests
    before = vars(torch.jit.ScriptFunction)["__call__"]
    models = [dispatch_model(reading(), {"": "cpu"}, main_device=0) for _ in range(2)]
    undispatch(models.pop())
    models.clear()  # without being undispatched
    gc.collect()
    assert vars(torch.jit.ScriptFunction)["__call__"] is before
    dispatch_model(reading(), {"": 0})  # has no weight that would have to be copied
    assert vars(torch.jit.ScriptFunction)["__call__"] is before
