"""Models of one pipeline, each dispatched under a share of the device's budget, run one after the other within it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, get_plan, undispatch
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory

pytestmark = pytest.mark.usefixtures("accelerators")

WIDTH, STEPS = 64, 3
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    """A model of the pipeline; its `decode` is called by others, as an autoencoder's is."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * 2


def pipeline() -> tuple[Layers, Layers, Layers]:
    torch.manual_seed(0)
    return Layers(4), Layers(8), Layers(3)


def run(models: tuple[Layers, Layers, Layers], x: torch.Tensor) -> torch.Tensor:
    """Encode a text, denoise in steps, decode."""
    encoder, denoiser, decoder = models
    with torch.no_grad():
        text, x = encoder(x), torch.zeros_like(x)
        for _ in range(STEPS):
            x = x + denoiser(x + text)
        return decoder.decode(x)


@pytest.mark.slow
def test_models_of_a_pipeline_keep_to_their_shares_of_one_budget() -> None:
    expected = run(pipeline(), X)
    models = pipeline()
    gc.collect()
    before = memory_allocated(0)
    for model, share in zip(models, (60_000, 80_000, 90_000), strict=True):
        dispatch_model(model, max_memory={0: share, "cpu": "1GB"}, main_device=0, sample_inputs=X)
    plans = [get_plan(model) for model in models]
    assert [bool(plan.streamed) for plan in plans] == [True, True, False]
    x = X.to("virtual:0")
    reset_peak_memory(0)
    found = run(models, x)
    taken = max_memory_allocated(0) - before
    assert torch.equal(found.cpu(), expected)
    # What the pipeline itself holds: the input, the text, the state and its next, a sum.
    assert taken <= sum(plan.devices[0].total for plan in plans) + 5 * x.nbytes
    for model, plain in zip(models, pipeline(), strict=True):
        for one, other in zip(undispatch(model, "cpu").parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)
