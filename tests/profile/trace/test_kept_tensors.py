"""Tensors that modules keep from one forward to the next: plans count the second forward, which runs beside them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm

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
