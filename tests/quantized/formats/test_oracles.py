"""Each format restores, bit for bit, what its own library does, where that is installed."""

from __future__ import annotations

import pytest
import torch

from ...marks import needs
from ..twins import Tensors, Twin, bnb4, bnb8, fp8, mxfp4, nvfp4, packed, plain
from .test_formats import format_of

SHAPE = (64, 128)


def made(twin: Twin) -> tuple[Tensors, torch.Tensor]:
    """Return random stored tensors, and the weight that is restored from them."""
    torch.manual_seed(2)
    tensors = twin.make(SHAPE)
    return tensors, format_of(twin, tensors, SHAPE).restore(tensors, SHAPE, torch.bfloat16)


def test_fp8_is_what_transformers_dequantises() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors, found = made(fp8())
    oracle = Fp8Dequantize(None)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], torch.bfloat16)
    assert torch.equal(found, oracle)


def test_mxfp4_is_what_transformers_dequantises() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, found = made(mxfp4())
    stacked = tensors["weight_blocks"].unsqueeze(0), tensors["weight_scales"].unsqueeze(0)
    oracle = convert_moe_packed_tensors(*stacked, dtype=torch.bfloat16)[0]
    assert torch.equal(found, oracle if oracle.shape == found.shape else oracle.T)


@needs("compressed_tensors")
@pytest.mark.parametrize(
    "twin",
    [
        packed(),
        packed(group=None),
        packed(bits=3),
        packed(symmetric=False),
        packed(bits=8, symmetric=False),
        plain(),
        plain("float8"),
        plain("float8", "tensor"),
        plain("float8", "block"),
        nvfp4(),
    ],
    ids=lambda twin: twin.name,
)
def test_a_weight_is_what_compressed_tensors_decompresses(twin: Twin) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    tensors, found = made(twin)
    group = twin.config["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=group["targets"], weights=group["weights"])
    compressor = BaseCompressor.get_value_from_registry(twin.config["format"])
    oracle = compressor.decompress(dict(tensors), scheme)["weight"]
    assert torch.equal(found, oracle)


@pytest.mark.slow
@needs("bitsandbytes")
@pytest.mark.parametrize("twin", [bnb4(), bnb4("fp4"), bnb4(nested=True)], ids=lambda twin: twin.name)
def test_a_weight_is_what_bitsandbytes_dequantises(twin: Twin) -> None:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    tensors, found = made(twin)
    state = {leaf.removeprefix("weight."): tensor for leaf, tensor in tensors.items() if leaf != "weight"}
    oracle = dequantize_4bit(tensors["weight"], QuantState.from_dict(state, torch.device("cpu")))
    assert torch.equal(found, oracle.view(SHAPE))


@needs("bitsandbytes")
def test_int8_is_what_bitsandbytes_dequantises() -> None:
    from bitsandbytes.functional import int8_vectorwise_dequant

    tensors, found = made(bnb8())
    assert torch.equal(found, int8_vectorwise_dequant(tensors["weight"], tensors["SCB"]).to(torch.bfloat16))
