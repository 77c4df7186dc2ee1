"""Autocast on the virtual accelerator casts what it casts on a real one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = "virtual:0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_computed_in_half_precision_and_sums_in_float32(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    with torch.autocast("virtual", dtype=dtype):
        product = layer(x)
        assert product.dtype == dtype
        assert (product @ product.T).dtype == dtype
        assert (x + product).dtype == torch.float32
        assert product.relu().dtype == dtype
        for one in (F.softmax(product, -1), F.layer_norm(product, (4,)), product.sum(), product.exp()):
            assert one.dtype == torch.float32
    assert layer(x).dtype == torch.float32
    assert torch.equal(
        product.cpu(), F.linear(x.cpu().to(dtype), layer.weight.cpu().to(dtype), layer.bias.cpu().to(dtype))
    )


def test_gradients_come_back_in_the_precision_of_the_weights() -> None:
    layer, x = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    with torch.autocast("virtual", dtype=torch.bfloat16):
        loss = F.cross_entropy(layer(x), torch.tensor([0, 1], device=DEVICE))
    loss.backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.abs().sum() > 0


def test_autocast_can_be_switched_off_and_leaves_the_host_and_float64_alone() -> None:
    layer, x = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    with torch.autocast("virtual", dtype=torch.bfloat16):
        with torch.autocast("virtual", enabled=False):
            assert layer(x).dtype == torch.float32
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
        assert layer.double()(x.double()).dtype == torch.float64
