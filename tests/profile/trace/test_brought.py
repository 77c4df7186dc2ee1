"""Models that bring a tensor to the device of one of their weights: the copy is planned where there is one."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile import Profile, profile_model
from bigmodel.profile.trace.trace import Allocate

WIDTH, ROWS = 8, 64


class Bringing(nn.Module):
    """Brings its input to the device of its first weight, and keeps it there until it returns, as encoders of sounds
    do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(device=self.first.weight.device, dtype=self.first.weight.dtype)
        found: torch.Tensor = self.second(self.first(x))
        return found


def brought(model: nn.Module) -> list[str]:
    """Return the units whose weights' devices tensors are brought to."""
    profile = profiled(model)
    events = profile.phases[0].trace.events
    units = [event.brought_to for event in events if isinstance(event, Allocate) and event.brought_to is not None]
    return [profile.units[unit].name for unit in units]


def profiled(model: nn.Module) -> Profile:
    return profile_model(model, sample_inputs=(torch.ones(ROWS, WIDTH),), device_type="virtual")


def test_a_tensor_is_brought_to_the_device_of_a_weight() -> None:
    assert brought(Bringing()) == ["first"]


def test_a_tensor_that_is_brought_to_the_device_of_another_is_not() -> None:
    class Following(Bringing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.to(self.first(x).device)
            found: torch.Tensor = self.second(y.to((y + self.second.bias).device))
            return found

    assert brought(Following()) == []


def test_within_a_unit_a_tensor_is_where_the_weights_are() -> None:
    blocks = nn.Sequential(*(Bringing() for _ in range(3)))
    assert brought(blocks) == []


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("where", [0, 1])
def test_the_copy_is_planned_to_the_byte_where_the_devices_differ(where: int) -> None:
    model = Bringing()
    profile = profiled(model)
    devices = {profile.units.index(unit): where if unit.name == "first" else 0 for unit in profile.units}
    peaks = profile.dynamic_peaks(devices, main=0)
    gc.collect()
    before = memory_allocated(where)
    dispatch_model(model, {"first": where, "second": 0}, main_device=0)
    weights = memory_allocated(where) - before
    x = torch.ones(ROWS, WIDTH, device="virtual:0")
    reset_peak_memory(where)
    with torch.no_grad():
        model(x)
    assert max_memory_allocated(where) - before == weights + peaks[where]
