"""A model from a quantised checkpoint is saved as that was published."""

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

from ..marks import slow_but
from .checkpoints import TOKENS, deepseek_v3, gpt_oss, llama, mixtral, published, qwen3_moe
from .twins import LINEAR, Twin, bnb4, fp8, mxfp4, packed

MODELS: list[tuple[Twin, Callable[..., Any]]] = [
    *((twin, llama) for twin in LINEAR),
    (fp8(), mixtral),
    (fp8(None), deepseek_v3),
    (packed(), qwen3_moe),
    (bnb4(), qwen3_moe),
    (mxfp4(), gpt_oss),
]
QUICK = [(twin, make) for twin, make in MODELS if (twin.name, make) in (("nf4-nested", llama), ("fp8", mixtral))]


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("device", ["cpu", "disk", "streamed"])
@pytest.mark.parametrize(
    ("twin", "make"), slow_but(QUICK, MODELS), ids=lambda each: getattr(each, "name", None) or each.__name__
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
