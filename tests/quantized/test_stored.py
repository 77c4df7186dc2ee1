"""Stored tensors are moved, and never cast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigmodel.checkpoint import save_model
from bigmodel.dispatch import from_pretrained
from bigmodel.quantized.stored import stored_names

from ..examples import some
from .checkpoints import LAYERS, TOKENS, deepseek_v3, gpt_oss, llama, mixtral, published, qwen3_moe
from .twins import LINEAR, Twin, bnb4, fp8, mxfp4, packed


def test_a_dtype_is_that_of_restored_weights(tmp_path: Path) -> None:
    whole = published(tmp_path / "q", packed()).float()
    model = from_pretrained(tmp_path / "q", device_map="cpu", dtype="float32", context_length=16)
    names = stored_names(model)
    assert len(names) == 3 * 7 * LAYERS
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {kinds[name] for name in names} == {torch.int32, torch.bfloat16, torch.int64}
    assert {kinds[name] for name in kinds.keys() - names} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)


def test_casting_a_model_casts_what_its_weights_are_restored_to(tmp_path: Path) -> None:
    whole = published(tmp_path / "q", packed()).float()
    model = from_pretrained(tmp_path / "q", device_map="cpu", context_length=16)
    before = {name: model.get_parameter(name).clone() for name in stored_names(model)}
    model.float()
    assert all(model.get_parameter(name).dtype == tensor.dtype for name, tensor in before.items())
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in before.items())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)


@pytest.mark.slow
def test_a_state_dict_has_published_names_and_loads_again(tmp_path: Path) -> None:
    published(tmp_path / "q", bnb4(nested=True))
    model, other = (from_pretrained(tmp_path / "q", device_map="cpu", context_length=16) for _ in range(2))
    saved = model.state_dict()
    assert "model.layers.0.self_attn.q_proj.weight.nested_absmax" in saved
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        other.load_state_dict(saved)
        assert torch.equal(model(TOKENS).logits, other(TOKENS).logits)


def test_a_weight_that_is_read_outside_its_layer_is_restored(tmp_path: Path) -> None:
    whole = published(tmp_path / "q", packed())
    model = from_pretrained(tmp_path / "q", device_map="cpu", context_length=16)
    found = model.model.layers[1].mlp.down_proj
    assert torch.equal(found.weight, whole.model.layers[1].mlp.down_proj.weight)
    assert "weight" not in dict(found.named_parameters())
    assert "int4, groups of 32" in repr(found)


MODELS: list[tuple[Twin, Callable[..., Any]]] = [
    *((twin, llama) for twin in LINEAR),
    (fp8(), mixtral),
    (fp8(None), deepseek_v3),
    (packed(), qwen3_moe),
    (bnb4(), qwen3_moe),
    (mxfp4(), gpt_oss),
]
LIKE_OTHERS = [
    (twin, make)
    for twin, make in MODELS
    if (twin.name, make) in (("nf4-nested", llama), ("fp8", mixtral), ("int4-group-zeros", llama))
]
FURTHER = [each for each in MODELS if each not in LIKE_OTHERS]


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    ("twin", "make", "device"),
    [
        *((bnb4(nested=True), llama, device) for device in ("cpu", "disk")),
        *((twin, make, "streamed") for twin, make in some(FURTHER, first=7)),
        *(pytest.param(twin, make, "streamed", marks=pytest.mark.long) for twin, make in LIKE_OTHERS),
    ],
    ids=lambda each: getattr(each, "name", None) or getattr(each, "__name__", None) or each,
)
def test_saving_writes_the_published_tensors(twin: Twin, make: Callable[..., Any], device: str, tmp_path: Path) -> None:
    whole = published(tmp_path / "q", twin, make)
    streamed = {"": "virtual:0", "model.layers.1": "cpu", "model.layers.2": "disk"}
    model = from_pretrained(
        tmp_path / "q", device_map=streamed if device == "streamed" else {"": device}, context_length=16
    )
    save_model(model, tmp_path / "saved")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("q", "saved"))
    names = {key for key in before if key not in after}
    assert names <= {"lm_head.weight"}  # a tied one is written once
    assert after.keys() <= before.keys()
    for key, tensor in after.items():
        assert (tensor.dtype, tensor.shape) == (before[key].dtype, before[key].shape)
        assert torch.equal(tensor.view(-1).view(torch.uint8), before[key].view(-1).view(torch.uint8))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"] == twin.config
    again = from_pretrained(tmp_path / "saved", device_map="cpu", context_length=16)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, whole(TOKENS).logits)
