"""Checkpoints of random weights: made once, complete or not there, readable by everybody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bigmodel.benchmarks import checkpoints
from bigmodel.benchmarks.checkpoints import INDEX, SPECS, Spec, checkpoint, make, tensor_shapes
from bigmodel.checkpoint import Checkpoint
from bigmodel.errors import CheckpointNotFoundError

TINY = SPECS["tiny"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(TINY, tmp_path_factory.mktemp("checkpoints") / "tiny")


def test_shards_keep_their_size_and_the_index_names_every_tensor(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / INDEX).read_text())
    assert len(shards) > 1
    assert all(sum(t.nbytes for t in load_file(shard).values()) <= TINY.shard_bytes for shard in shards)
    assert index["weight_map"] == {name: shard.name for shard in shards for name in load_file(shard)}
    assert index["metadata"]["total_size"] == Checkpoint.open(folder).total_bytes()


@pytest.mark.slow
def test_transformers_loads_every_weight(folder: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_experts_are_published_one_by_one_and_load_fused(tmp_path: Path) -> None:
    made = make(SPECS["tiny-mixtral"], tmp_path / "moe")
    names = set(Checkpoint.open(made))
    assert "model.layers.1.block_sparse_moe.experts.7.w2.weight" in names
    model, info = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_the_same_spec_makes_the_same_weights(folder: Path, tmp_path: Path) -> None:
    again = make(TINY, tmp_path / "again")
    for shard in folder.glob("*.safetensors"):
        assert shard.read_bytes() == (again / shard.name).read_bytes()


def test_a_checkpoint_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_write", None)
    assert make(TINY, folder) == folder


def test_an_interrupted_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(TINY, tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_full_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(OSError, match="10 bytes free"):
        make(TINY, tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_names_differ_with_what_is_in_them() -> None:
    assert len({spec.digest for spec in SPECS.values()}) == len(SPECS)
    assert Spec("llama", TINY.config, seed=1).digest != TINY.digest


def test_the_large_one_has_1_1_billion_parameters() -> None:
    numbers = [torch.Size(shape).numel() for _, shape in tensor_shapes(SPECS["llama-1b"])]
    assert sum(numbers) == 1_100_048_384


def test_a_path_is_taken_as_it_is_and_an_unknown_name_refused(folder: Path, tmp_path: Path) -> None:
    assert checkpoint(str(folder), tmp_path) == folder
    with pytest.raises(CheckpointNotFoundError, match="neither a path nor one of"):
        checkpoint("nothing-like-it", tmp_path)
