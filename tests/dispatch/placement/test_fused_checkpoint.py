"""Checkpoints that store experts one by one are used where they lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from bigmodel.checkpoint import Checkpoint, convert_keys, save_model
from bigmodel.devices import virtual
from bigmodel.dispatch import load_checkpoint_and_dispatch, undispatch
from bigmodel.dispatch.placement.fused_checkpoint import with_fused_views
from bigmodel.dispatch.pretrained import build_on_meta, from_pretrained
from bigmodel.dispatch.weights.fused_view import FusedView, lies_on_disk

from ...examples import alike
from ..mixtures import EXPERT_BYTES, LAYERS, deepseek_v3, experts_of, mixtral, qwen2_moe, qwen3_moe, tokens

pytestmark = pytest.mark.usefixtures("accelerators")


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits.cpu()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the per-expert checkpoint of `mixtral`, in several files."""
    mixtral().save_pretrained(tmp_path, max_shard_size="100KB")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in Checkpoint.open(tmp_path)
    return tmp_path


@pytest.mark.slow
@alike("build", [mixtral, qwen3_moe, deepseek_v3, qwen2_moe], first=3)
def test_experts_on_disk_are_views_of_the_checkpoint(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    loaded = from_pretrained(tmp_path, {"": "disk", "model.embed_tokens": 0})
    for name in ("gate_up_proj", "down_proj"):
        weights = getattr(experts_of(loaded, 1), name)
        assert isinstance(weights, FusedView)
        assert lies_on_disk(weights)
        assert torch.equal(weights, getattr(experts_of(model, 1), name))
    assert torch.equal(logits(loaded), model.to("virtual:0")(tokens().to("virtual:0")).logits.cpu())
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_only_the_chosen_experts_are_read(folder: Path) -> None:
    model = from_pretrained(folder, {"": 0, "model.layers": "disk"}, expert_cache=1 << 30)
    with torch.no_grad():
        model(tokens(1))
    counters = model.dispatch_stats()["experts"]["virtual:0"]
    assert counters["bytes_from_disk"] == LAYERS * 2 * EXPERT_BYTES
    assert counters["bytes_from_ram"] == 0


@pytest.mark.slow
def test_on_the_host_the_chosen_experts_come_into_memory_alone(folder: Path) -> None:
    model = from_pretrained(folder, {"": "disk"}, expert_cache=4 * EXPERT_BYTES)
    assert torch.equal(logits(model), logits(undispatch(from_pretrained(folder, {"": "disk"}))))
    counters = model.dispatch_stats()["experts"]["cpu"]
    assert counters["cache_bytes"] == 4 * EXPERT_BYTES
    assert counters["bytes_from_disk"] == counters["fetches"] * EXPERT_BYTES


@pytest.mark.slow
def test_the_same_through_load_checkpoint_and_dispatch(folder: Path) -> None:
    model = build_on_meta(folder)
    load_checkpoint_and_dispatch(model, folder, {"": 0, "model.layers": "disk"}, strict=True)
    assert isinstance(experts_of(model, 0).down_proj, FusedView)
    assert torch.equal(logits(model), mixtral().to("virtual:0")(tokens().to("virtual:0")).logits.cpu())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_the_dispatched_model_saves_as_the_checkpoint_was(folder: Path, tmp_path: Path) -> None:
    model = from_pretrained(folder, {"": "disk"})
    model.save_pretrained(tmp_path / "saved")
    saved, original = Checkpoint.open(tmp_path / "saved"), Checkpoint.open(folder)
    assert set(saved) == set(original)
    assert all(torch.equal(saved[key], original[key]) for key in original)


@pytest.mark.slow
def test_save_model_writes_the_fused_tensors(folder: Path, tmp_path: Path) -> None:
    model = from_pretrained(folder, {"": 0, "model.layers": "disk"})
    save_model(model, tmp_path / "saved")
    saved = Checkpoint.open(tmp_path / "saved")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(saved[name], experts_of(mixtral(), 1).gate_up_proj)


def test_the_undispatched_model_computes_by_itself(folder: Path) -> None:
    plain = undispatch(from_pretrained(folder, {"": "disk"}))
    assert not hasattr(plain, "dispatch_stats")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    torch.testing.assert_close(logits(plain), logits(expected))


def test_weights_not_for_the_disk_are_fused_in_memory(tmp_path: Path) -> None:
    mixtral(num_hidden_layers=3).save_pretrained(tmp_path)
    device_map = {"": 0, "model.layers.0": "cpu", "model.layers.1": "disk"}
    model = from_pretrained(tmp_path, device_map)
    in_ram = experts_of(model, 0).down_proj
    assert isinstance(in_ram, nn.Parameter)
    assert not isinstance(in_ram, FusedView)
    assert isinstance(experts_of(model, 1).down_proj, FusedView)
    assert experts_of(model, 2).down_proj.device == torch.device("virtual:0")
    assert virtual.count() == 2


def test_a_checkpoint_without_experts_is_left_alone(folder: Path) -> None:
    opened = Checkpoint.open(folder)
    model = build_on_meta(folder)
    names = dict.fromkeys(model.state_dict(), True)
    conversion = convert_keys(model, names, {key: opened.entry(key) for key in opened})
    assert with_fused_views(opened, conversion, {"": "cpu"}) is opened
    fused = with_fused_views(opened, conversion, {"": "cpu", "model.layers.0.mlp": "disk"})
    assert len(opened) - len(fused) == 3 * 8 - 2
    assert fused.entry("model.layers.0.mlp.experts.down_proj").shape == (8, 32, 64)
    assert json.loads((folder / "config.json").read_text())["num_local_experts"] == 8
