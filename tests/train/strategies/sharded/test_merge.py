"""One set of weights from shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigmodel.errors import CheckpointNotFoundError
from bigmodel.train.strategies.sharded.distributed_files import save_folder
from bigmodel.train.strategies.sharded.merge import merge_fsdp_weights

WEIGHTS = {f"layers.{i}.weight": torch.full((64,), float(i)) for i in range(5)}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    save_folder({"model": dict(WEIGHTS)}, tmp_path / "state" / "pytorch_model_fsdp_0")
    return tmp_path / "state"


def test_small_models_become_one_file(state: Path, tmp_path: Path) -> None:
    target = merge_fsdp_weights(state, tmp_path / "out")
    found = load_file(target / "model.safetensors")
    assert set(found) == set(WEIGHTS)
    assert all(torch.equal(found[name], value) for name, value in WEIGHTS.items())


def test_large_models_become_shards_no_larger_than_asked(state: Path, tmp_path: Path) -> None:
    target = merge_fsdp_weights(state, tmp_path / "out", max_shard_size=2 * 256)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 256
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(target / file)[name], WEIGHTS[name])


def test_bin_files_and_removal(state: Path, tmp_path: Path) -> None:
    target = merge_fsdp_weights(state, tmp_path / "out", safe_serialization=False, remove_checkpoint_dir=True)
    assert set(torch.load(target / "pytorch_model.bin", weights_only=True)) == set(WEIGHTS)
    assert not (state / "pytorch_model_fsdp_0").exists()


def test_a_folder_without_shards_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="has no sharded weights"):
        merge_fsdp_weights(tmp_path, tmp_path / "out")
