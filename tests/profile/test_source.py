from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bigmodel.errors import CheckpointError, PlanError
from bigmodel.profile import meta_model, profile_source
from bigmodel.sources.resolve import open_source

from .sources import weight_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.slow
def test_a_profile_from_a_folder_has_the_bytes_of_the_checkpoint(folder: Path) -> None:
    profile = profile_source(folder, context_length=16)
    assert profile.weights == weight_bytes(open_source(folder))
    assert profile.name == "LlamaForCausalLM"


def test_the_model_is_built_on_meta_in_the_given_dtype(folder: Path) -> None:
    assert {p.dtype for p in meta_model(open_source(folder)).parameters()} == {torch.bfloat16}
    wide = meta_model(open_source(folder), "float32")
    assert {(p.dtype, p.device.type) for p in wide.parameters()} == {(torch.float32, "meta")}


def test_a_config_without_dtype_takes_the_checkpoints(folder: Path) -> None:
    rewrite(folder, dtype=None)
    assert {p.dtype for p in meta_model(open_source(folder)).parameters()} == {torch.bfloat16}


def test_an_unknown_architecture_is_one_clear_error(folder: Path) -> None:
    rewrite(folder, model_type="hyperformer", auto_map={"AutoConfig": "evil.py"})
    with pytest.raises(PlanError, match="hyperformer"):
        profile_source(folder)


def test_a_config_without_a_model_type_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(PlanError, match="model_type"):
        profile_source(folder)


def test_a_folder_without_safetensors_is_refused(folder: Path) -> None:
    for shard in folder.glob("model*"):
        shard.unlink()
    with pytest.raises(CheckpointError):
        profile_source(folder)


def test_a_dtype_of_eight_bits_is_refused_whoever_names_it(folder: Path) -> None:
    with pytest.raises(PlanError, match="does not compute in float8_e5m2; give a wider dtype"):
        profile_source(folder, dtype="float8_e5m2")
    rewrite(folder, dtype="float8_e4m3fn")
    with pytest.raises(PlanError, match="does not compute in float8_e4m3fn"):
        profile_source(folder)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_dtype_that_a_model_cannot_be_loaded_as_is_refused(dtype: str, folder: Path) -> None:
    with pytest.raises(PlanError, match=f"the dtype {dtype}; give one of floating point"):
        profile_source(folder, dtype=dtype)


def test_an_infinity_in_the_config_is_read_as_transformers_writes_it(folder: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
    }
    limit = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    rewrite(folder, model_type="mamba2", architectures=["Mamba2ForCausalLM"], n_groups=1, expand=2, **sizes, **limit)
    assert meta_model(open_source(folder)).config.time_step_limit[1] == float("inf")
