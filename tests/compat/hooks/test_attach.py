"""Which modules of a model get a hook."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.hooks import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_submodules,
)

from ...accelerators import at, held

pytestmark = pytest.mark.usefixtures("accelerators")
X = torch.ones(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


def hooked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]


def test_modules_that_hold_tensors_are_offloaded_one_by_one() -> None:
    model = Net()
    expected = model(X)
    attach_align_device_hook(model, at(0), offload=True)
    assert hooked(model) == ["first", "block.0", "last"]
    assert torch.equal(model(X).cpu(), expected)
    assert held(0) == 0


def test_a_preloaded_class_has_one_hook_for_all_of_its_weights() -> None:
    model = Net()
    expected = model(X)
    attach_align_device_hook(model, at(0), offload=True, preload_module_classes=["Sequential"])
    assert hooked(model) == ["first", "block", "last"]
    assert torch.equal(model(X).cpu(), expected)


def test_every_module_with_weights_in_it_may_get_its_inputs_on_the_device() -> None:
    model = Net()
    attach_execution_device_hook(model, at(0))
    assert hooked(model) == ["", "first", "block", "block.0", "last"]
    assert str(model(X).device) == at(0)


def test_blocks_have_devices_of_their_own() -> None:
    model = Net()
    expected = model(X)
    devices = {"first": at(0), "block": at(1), "last": at(1)}
    offload = {"first": False, "block": False, "last": True}
    attach_align_device_hook_on_blocks(model, devices, offload)
    assert {str(p.device) for p in model.block.parameters()} == {at(1)}
    assert model.last.weight.device.type == "cpu"
    output = model(X)
    assert output.device.type == "cpu"
    assert torch.equal(output, expected)
    remove_hook_from_submodules(model)
    assert hooked(model) == []


@pytest.mark.parametrize("offload", [False, True])
def test_one_device_is_for_the_whole_model(offload: bool) -> None:
    model = Net()
    expected = model(X)
    attach_align_device_hook_on_blocks(model, at(0), offload)
    assert torch.equal(model(X).cpu(), expected)
    assert isinstance((model.first if offload else model)._hf_hook, AlignDevicesHook)
