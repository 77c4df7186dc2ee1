"""Tensors that modules keep from one forward to the next: plans count the second forward, which runs beside them, and
say by how much memory grows where each forward keeps more."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm

from bigmodel import dispatch_model, get_plan
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile import profile_model

pytestmark = pytest.mark.usefixtures("accelerators")

WIDTH, ROWS = 64, 40


class Keeping(nn.Linear):
    """Keeps what it returned, as modules keep attention weights for whoever looks at them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        return self.last.relu()


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.random_unstructured(layer, "weight", 0.5)  # type: ignore[no-any-return, no-untyped-call]


def keeping(_: nn.Linear) -> nn.Module:
    return Keeping(WIDTH, WIDTH)


def plain(layer: nn.Linear) -> nn.Module:
    return layer


@pytest.mark.parametrize("change", [plain, pruned, spectral_norm, keeping])
def test_the_peak_of_two_forwards_is_predicted_to_the_byte(change: Callable[[nn.Linear], nn.Module]) -> None:
    model = nn.Sequential(*(change(nn.Linear(WIDTH, WIDTH)) for _ in range(3)), nn.Linear(WIDTH, 1)).eval()
    x = torch.randn(ROWS, WIDTH)
    profile = profile_model(model, sample_inputs=x, device_type="virtual")
    assert profile.unknown == ""
    before = memory_allocated(0)
    model.to("virtual:0")
    given = x.to("virtual:0")
    gc.collect()
    reset_peak_memory(0)
    with torch.inference_mode():
        for _ in range(2):
            model(given)
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    assert max_memory_allocated(0) - before == predicted


def test_a_forward_that_keeps_nothing_is_recorded_once() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    profile = profile_model(model, sample_inputs=torch.randn(ROWS, WIDTH), device_type="virtual")
    assert [len(phase.also) for phase in profile.phases] == [0]


class Growing(nn.Linear):
    """Keeps more with each forward, in a buffer."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(width, outputs)
        self.register_buffer("seen", torch.zeros(1, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.seen = torch.cat([self.seen, x])
        return x


class Listing(nn.Linear):
    """Keeps all that it returned."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(width, outputs)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(super().forward(x))
        return self.seen[-1].relu()


@pytest.mark.parametrize("kind", [Growing, Listing])
def test_three_forwards_of_a_module_that_keeps_more_each_time_are_planned(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 1)).eval()
    x = torch.randn(ROWS, WIDTH)
    profile = profile_model(model, sample_inputs=x, device_type="virtual")
    before = memory_allocated(0)
    model.to("virtual:0")
    given = x.to("virtual:0")
    gc.collect()
    reset_peak_memory(0)
    with torch.inference_mode():
        for _ in range(3):
            model(given)
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    # What a buffer holds at first counts on, although the module lets go of it.
    assert predicted - profile.buffers <= max_memory_allocated(0) - before <= predicted


@pytest.mark.parametrize("kind", [Growing, Listing])
@pytest.mark.parametrize("depth", [2, 12])
def test_the_plan_says_by_how_much_memory_grows(kind: type[nn.Linear], depth: int) -> None:
    model = nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(depth))).eval()
    dispatch_model(model, max_memory={0: "1MB", "cpu": "1GB"}, sample_inputs=torch.randn(ROWS, WIDTH))
    kept = {2: "20.00 KiB", 12: "120.00 KiB"}[depth]
    (note,) = get_plan(model).notes
    assert note == (
        f"memory grows by {kept} with each forward, as the model's modules keep more each time; "
        "3 forwards are planned for: clear what they keep after these, or leave more memory free"
    )
