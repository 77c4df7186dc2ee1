"""Modules of a model on meta are replaced by what the headers of its checkpoint say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigmodel.dispatch import from_pretrained
from bigmodel.quantized.experts import QuantizedExperts
from bigmodel.quantized.linear import QuantizedLinear

from ..examples import some
from .checkpoints import LAYERS, TOKENS, deepseek_v3, gpt_oss, llama, mixtral, published, qwen3, qwen3_moe
from .twins import LINEAR, Twin, awq, bnb4, bnb8, fp8, gptq, mxfp4, nvfp4, packed, plain


@pytest.mark.slow
@pytest.mark.parametrize("twin", LINEAR, ids=lambda twin: twin.name)
def test_a_model_computes_bit_for_bit_what_its_dequantised_self_does_from_the_bytes_of_the_file(
    twin: Twin, tmp_path: Path
) -> None:
    whole = published(tmp_path / "q", twin, llama)
    model = from_pretrained(tmp_path / "q", device_map="cpu", context_length=16)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 7 * LAYERS
    assert type(model.lm_head) is torch.nn.Linear
    saved, found = load_file(tmp_path / "q" / "model.safetensors"), model.state_dict()
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].contiguous().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


MIXTURES = [
    (fp8(), mixtral),
    (fp8(), deepseek_v3),
    (fp8(None), qwen3_moe),
    (plain("float8"), qwen3_moe),
    (nvfp4(), qwen3_moe),
    (gptq(), qwen3_moe),
    (awq(), qwen3_moe),
    (bnb4(), qwen3_moe),
    (bnb8(), mixtral),
    (packed(), qwen3_moe),
    (mxfp4(), gpt_oss),
]


@pytest.mark.parametrize(
    ("twin", "make", "implementation"),
    [
        *((*MIXTURES[-1], name) for name in ("grouped_mm", "eager", "batched_mm")),
        *(pytest.param(*MIXTURES[0], name, marks=pytest.mark.slow) for name in ("eager", "batched_mm")),
        *(pytest.param(*each, "grouped_mm", marks=pytest.mark.slow) for each in some(MIXTURES[:-2], first=4)),
        pytest.param(*MIXTURES[-2], "grouped_mm", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=lambda each: getattr(each, "name", None) or getattr(each, "__name__", None) or each,
)
def test_experts_compute_what_their_dequantised_selves_do(
    twin: Twin, make: object, implementation: str, tmp_path: Path
) -> None:
    whole = published(tmp_path / "q", twin, make)  # type: ignore[arg-type]
    model = from_pretrained(tmp_path / "q", device_map="cpu", context_length=16)
    for each in (whole, model):
        each.set_experts_implementation(implementation)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
    experts = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    assert len(experts) == LAYERS - (make is deepseek_v3)


def test_weights_tied_to_others_stay_whole(tmp_path: Path) -> None:
    whole = published(tmp_path / "q", fp8(), qwen3)
    model = from_pretrained(tmp_path / "q", device_map="cpu", context_length=16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
