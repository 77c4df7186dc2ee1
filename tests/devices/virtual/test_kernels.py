"""Layers whose kernels accelerators have and the CPU lacks: the CPU computes them, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = "virtual:1"

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True),
    "projected": lambda: nn.LSTM(8, 6, proj_size=3),
    "lstm without bias": lambda: nn.LSTM(8, 6, bias=False),
    "gru": lambda: nn.GRU(8, 6, 2),
    "gru without bias": lambda: nn.GRU(8, 6, bias=False, bidirectional=True),
    "rnn": lambda: nn.RNN(8, 6, 2),
    "lstm cell": lambda: nn.LSTMCell(8, 6),
    "gru cell": lambda: nn.GRUCell(8, 6),
}


def results(model: nn.Module, *inputs: Any) -> list[torch.Tensor]:
    """Outputs, and gradients of the inputs and weights, on the host."""
    given = [value.clone().requires_grad_() for value in inputs]
    outputs = tree_leaves(model(*given))
    sum(((number + 1) * output).pow(2).sum() for number, output in enumerate(outputs)).backward()  # type: ignore[union-attr]
    gradients = [value.grad for value in [*given, *model.parameters()]]
    return [value.detach().cpu() for value in [*outputs, *gradients]]


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_compute_what_they_compute_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    model, values = RECURRENT[name](), torch.randn(3, 5, 8)
    values = values[0] if name.endswith("cell") else values
    expected = results(model, values)
    with torch.inference_mode():
        inferred = [value.clone() for value in tree_leaves(model(values))]
    model.zero_grad()
    model.to(DEVICE)
    torch.testing.assert_close(results(model, values.to(DEVICE)), expected)
    with torch.inference_mode():
        found = [value.cpu() for value in tree_leaves(model(values.to(DEVICE)))]
    torch.testing.assert_close(found, inferred)


def test_a_packed_sequence_keeps_its_lengths_on_the_host() -> None:
    torch.manual_seed(0)
    model, values = nn.LSTM(8, 6), torch.randn(5, 3, 8)

    def run(values: torch.Tensor) -> torch.Tensor:
        output, _ = model(pack_padded_sequence(values, torch.tensor([5, 3, 2])))
        assert output.batch_sizes.device.type == "cpu"
        return pad_packed_sequence(output)[0]

    expected = run(values).detach()
    model.to(DEVICE)
    given = values.to(DEVICE).requires_grad_()
    found = run(given)
    found.sum().backward()
    torch.testing.assert_close(found.detach().cpu(), expected)
    assert given.grad is not None
    assert given.grad.cpu()[3:, 1:].abs().sum() == given.grad.cpu()[3:, 1].abs().sum() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_padded_transformer_encoder_computes_every_token_that_is_not_padding(mode: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, values = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = padding[2, 4:] = True
    with mode():
        expected = model(values, src_key_padding_mask=padding).detach()
        found = model.to(DEVICE)(values.to(DEVICE), src_key_padding_mask=padding.to(DEVICE))
    torch.testing.assert_close(found.cpu()[~padding], expected[~padding], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_images_are_resized_without_aliasing_in_16_bits(mode: str, dtype: torch.dtype) -> None:
    image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)

    def resized(values: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(values, size=(5, 5), mode=mode, antialias=True)

    given = image.to(DEVICE).requires_grad_()
    expected = image.float().requires_grad_()
    found, whole = resized(given), resized(expected)
    assert torch.equal(found.cpu(), whole.to(dtype))
    found.sum().backward()
    whole.sum().backward()
    assert given.grad is not None
    assert expected.grad is not None
    assert torch.equal(given.grad.cpu(), expected.grad.to(dtype))
