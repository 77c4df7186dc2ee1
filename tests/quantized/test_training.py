"""Adapters are trained on frozen weights as stored, resident or streamed, which are restored again in the backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model, from_pretrained
from bigmodel.quantized.linear import QuantizedLinear

from ..accelerators import at, exact
from ..examples import some
from ..marks import needs
from .checkpoints import TOKENS, gpt_oss, llama, mixtral, published
from .twins import Twin, bnb4, fp8, mxfp4, packed

PREFIX = "base_model.model."
STREAMED: dict[str, Any] = {
    **dict.fromkeys((PREFIX + name for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")), 0),
    **{f"{PREFIX}model.layers.{n}": device for n, device in enumerate(("cpu", "disk", 0))},
}


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    found: nn.Module = get_peft_model(model, config).train()
    return found


def gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@needs("peft")
@pytest.mark.usefixtures("every_accelerator")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("twin", "make", "placement"),
    [
        pytest.param(bnb4(nested=True), llama, "streamed", marks=pytest.mark.long),
        *((t, llama, "streamed") for t in some([packed()], first=0)),
        pytest.param(mxfp4(), gpt_oss, "streamed", marks=pytest.mark.long),
        *((t, make, "streamed") for t, make in some([(fp8(), mixtral)], first=0)),
        (fp8(), llama, "resident"),
    ],
    ids=lambda each: getattr(each, "name", None) or getattr(each, "__name__", None) or each,
)
def test_adapters_get_the_gradients_that_the_dequantised_model_gives_them(
    twin: Twin, make: Callable[..., Any], placement: str, tmp_path: Path
) -> None:
    whole = with_adapters(published(tmp_path / "q", twin, make)).to(at(0))
    model = with_adapters(from_pretrained(tmp_path / "q", device_map="cpu", context_length=16))
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names == {name for name, p in whole.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in names)
    dispatch_model(model, STREAMED if placement == "streamed" else {"": 0}, offload_dir=tmp_path)
    tokens = TOKENS.to(at(0))
    expected, found = gradients(whole, tokens), gradients(model, tokens)
    assert found.keys() == expected.keys() == names
    for name, gradient in expected.items():
        if make is llama:
            assert torch.equal(found[name], gradient)
        else:  # gradients of hidden states are added up expert by expert
            torch.testing.assert_close(found[name], gradient, rtol=0.05, atol=0.005)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_has_the_gradients_of_its_restored_self(dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    layer, weight = quantised(64, 96, dtype)
    layer.bias.requires_grad_(True)
    bias = layer.bias.detach().clone().requires_grad_(True)
    inputs = [torch.randn(2, 5, 96).to(dtype).requires_grad_(True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = layer(inputs[0]), F.linear(inputs[1], weight, bias)
    assert torch.equal(*outputs)
    gradient = torch.randn(2, 5, 64).to(outputs[0].dtype)
    for output in outputs:
        output.backward(gradient)
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert torch.equal(layer.bias.grad, bias.grad)  # type: ignore[arg-type]


@pytest.mark.usefixtures("accelerators")
@exact
def test_no_restored_weight_is_kept_for_the_backward() -> None:
    layer, weight = quantised(256, 256, torch.float32)
    layer.to(at(0))
    x = torch.randn(1, 256, device=at(0), requires_grad=True)
    gc.collect()
    before = memory_allocated(0)
    output = layer(x)
    assert memory_allocated(0) - before <= output.nbytes + 512
    reset_peak_memory(0)
    output.sum().backward()
    assert max_memory_allocated(0) >= before + weight.nbytes
    assert memory_allocated(0) - before <= output.nbytes + 2 * x.nbytes + 1024


def quantised(rows: int, columns: int, dtype: torch.dtype) -> tuple[QuantizedLinear, torch.Tensor]:
    """Return a layer with random stored weights, and its restored weight."""
    from bigmodel.quantized.recognise import read_scheme
    from bigmodel.sources.headers import TensorEntry

    twin = packed()
    tensors = twin.make((rows, columns))
    entries = {leaf: TensorEntry(leaf, t.dtype, tuple(t.shape), 0, t.nbytes) for leaf, t in tensors.items()}
    scheme = read_scheme({"quantization_config": twin.config})
    assert scheme is not None
    format = scheme.format_of("", entries)
    layer = QuantizedLinear(nn.Linear(columns, rows, dtype=dtype), format, entries)
    for name, leaf in layer.stored.items():
        layer._parameters[name] = nn.Parameter(tensors[leaf], requires_grad=False)
    return layer, format.restore(tensors, (rows, columns), dtype)
