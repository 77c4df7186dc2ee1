"""What is broken, or in no known format, is refused in one line before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bigmodel.dispatch import from_pretrained
from bigmodel.errors import BigModelError, CheckpointFormatError
from bigmodel.quantized.recognise import FORMATS, read_scheme

from .checkpoints import gpt_oss, llama, published, qwen3_moe
from .twins import Tensors, Twin, awq, bnb4, bnb8, fp8, gptq, mxfp4, nvfp4, packed, plain

Q = "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]).contiguous())


def poked(name: str, value: float) -> Callable[[Tensors], None]:
    def poke(tensors: Tensors) -> None:
        flat = tensors[name].float().reshape(-1)
        flat[-1] = value
        tensors[name] = flat.view(tensors[name].shape).to(tensors[name].dtype)

    return poke


STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"
BROKEN: list[tuple[str, Twin, Callable[..., Any], Callable[[Tensors], None], str]] = [
    ("no scales", fp8(), llama, without(f"{Q}.weight_scale_inv"), "q_proj.*scales are missing"),
    ("no weight", fp8(), llama, without(f"{Q}.weight"), "q_proj.*its weight is missing"),
    ("fewer scales", fp8(), llama, changed(f"{Q}.weight_scale_inv", lambda t: t[:-1]), r"\(3, 4\), not \(4, 4\)"),
    ("NaN", fp8(), llama, poked(f"{Q}.weight_scale_inv", float("nan")), "weight_scale_inv.*not finite"),
    ("infinity", plain(), llama, poked(f"{Q}.weight_scale", float("inf")), "weight_scale.*not finite"),
    ("packed, no scales", packed(), llama, without(f"{Q}.weight_scale"), "q_proj.*its weight_scale is missing"),
    ("another group", packed(), llama, changed(f"{Q}.weight_scale", lambda t: t[:, :1]), "weight_scale has the shape"),
    ("narrow", packed(), llama, changed(f"{Q}.weight_packed", lambda t: t[:, :-1]), "weight_packed has the shape"),
    ("dtype", packed(), llama, changed(f"{Q}.weight_packed", lambda t: t.long()), "weight_packed is int64, not int32"),
    ("no global scale", nvfp4(), llama, without(f"{Q}.weight_global_scale"), "weight_global_scale is missing"),
    ("no zeros", gptq(), llama, without(f"{Q}.qzeros"), "its qzeros is missing"),
    ("groups", gptq(), llama, poked(f"{Q}.g_idx", 2), r"g_idx names groups outside 0 ... 1"),
    ("awq", awq(), llama, changed(f"{Q}.scales", lambda t: t[:, 1:]), "scales has the shape"),
    ("no state", bnb4(), llama, without(STATE), "its quant_state is missing"),
    ("state", bnb4(), llama, changed(STATE, lambda t: t[1:]), "quant_state is not JSON"),
    ("other state", bnb4(), llama, poked(STATE, 0), "quant_state is not JSON"),
    ("absmax", bnb4(), llama, changed(f"{Q}.weight.absmax", lambda t: t[:7]), "no 7 blocks of a known size"),
    ("SCB", bnb8(), llama, changed(f"{Q}.SCB", lambda t: t[1:]), "SCB has the shape"),
    ("an expert's scales", fp8(), qwen3_moe, without(f"{EXPERT}.weight_scale_inv"), "experts.2.up_proj.*missing"),
    ("an expert", packed(), qwen3_moe, changed(f"{EXPERT}.weight_scale", lambda t: t.half()), "stored otherwise"),
    (
        "blocks",
        mxfp4(),
        gpt_oss,
        changed("model.layers.0.mlp.experts.down_proj_blocks", lambda t: t[:-1]),
        "weight_blocks has the shape .* for 4 experts",
    ),
    (
        "mxfp4's NaN",
        mxfp4(),
        gpt_oss,
        poked("model.layers.0.mlp.experts.down_proj_scales", 255),
        "values of 255",
    ),
]


@pytest.mark.parametrize(("case", "twin", "make", "damage", "message"), BROKEN, ids=[case[0] for case in BROKEN])
def test_a_broken_checkpoint_is_refused(
    case: str,
    twin: Twin,
    make: Callable[..., Any],
    damage: Callable[[Tensors], None],
    message: str,
    tmp_path: Path,
) -> None:
    published(tmp_path / "q", twin, make)
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=message) as refused:
        from_pretrained(tmp_path / "q", device_map="cpu", context_length=16)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": GROUP}}


def weights(**changes: Any) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"g": {**GROUP, "weights": {**GROUP["weights"], **changes}}}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "config",
    [
        "fp8",
        [1],
        {"quant_method": "hqq"},
        {"quant_method": ["fp8"]},
        {},
        {"bits": 4},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": [True, 128]},
        {"quant_method": "fp8", "weight_block_size": [10**30, 128]},
        {**COMPRESSED, "config_groups": None},
        {**COMPRESSED, "config_groups": {"g": []}},
        {**COMPRESSED, "config_groups": {"g": {**GROUP, "targets": "Linear"}}},
        {**COMPRESSED, "config_groups": {"g": {**GROUP, "targets": ["re:("]}}},
        {**COMPRESSED, "format": "marlin-24"},
        {**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}},
        weights(num_bits=9),
        weights(num_bits=0),
        weights(group_size=0),
        weights(group_size="32"),
        weights(strategy="token"),
        weights(strategy="block"),
        weights(type="float"),
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "group_size": 0},
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "dynamic": {"x": {}}},
        {"quant_method": "awq", "bits": 8},
        {"quant_method": "awq", "version": "gemv"},
    ],
    ids=lambda config: json.dumps(config)[:60],
)
def test_a_config_that_cannot_be_read_is_refused(config: Any) -> None:
    if not config:
        assert read_scheme({"quantization_config": config}) is None
        return
    with pytest.raises(CheckpointFormatError, match="quantization_config") as refused:
        read_scheme({"quantization_config": config})
    assert "\n" not in str(refused.value)


def test_an_unknown_method_names_those_that_are_known() -> None:
    with pytest.raises(CheckpointFormatError, match=r"'hqq', which is not supported; .*gptq"):
        read_scheme({"quantization_config": {"quant_method": "hqq"}})
    assert set(FORMATS) == {"fp8", "compressed-tensors", "mxfp4", "bitsandbytes", "gptq", "awq", "gguf"}


def test_a_config_left_over_from_another_checkpoint_is_refused(tmp_path: Path) -> None:
    published(tmp_path / "q", packed())
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps({**config, "quantization_config": gptq().config}))
    with pytest.raises(BigModelError):
        from_pretrained(tmp_path / "q", device_map="cpu", context_length=16)


def test_quantising_for_the_link_as_well_is_refused(tmp_path: Path) -> None:
    published(tmp_path / "q", fp8())
    with pytest.raises(BigModelError, match=r"offload_dtype.*fp8"):
        from_pretrained(tmp_path / "q", device_map="cpu", context_length=16, offload_dtype="int8")
