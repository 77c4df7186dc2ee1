"""Saving models and other objects; freeing memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bigmodel.train import Accelerator, ProjectConfiguration
from tests.train.multiprocess import on_ranks


def test_a_model_is_saved_in_shards_and_loads_again(tmp_path: Path) -> None:
    accelerator = Accelerator(dynamo_backend="eager")
    bare = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    accelerator.save_model(accelerator.prepare(bare), tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 2
    state = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        name: tensor.tolist() for name, tensor in bare.state_dict().items()
    }


def test_a_model_can_be_saved_in_pytorch_s_format(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.save_model(nn.Linear(2, 2), tmp_path, safe_serialization=False)
    assert set(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)) == {"weight", "bias"}


def test_the_state_dict_is_the_bare_model_s() -> None:
    accelerator = Accelerator(dynamo_backend="eager")
    model = accelerator.prepare(nn.Linear(2, 2))
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]


@pytest.mark.parametrize("safe", [False, True])
def test_objects_are_saved(tmp_path: Path, safe: bool) -> None:
    Accelerator().save({"x": torch.ones(2)}, tmp_path / "o", safe_serialization=safe)
    back = load_file(tmp_path / "o") if safe else torch.load(tmp_path / "o", weights_only=True)
    assert back["x"].tolist() == [1.0, 1.0]


def test_what_was_prepared_is_forgotten() -> None:
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    gone = weakref.ref(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert (model, optimizer) == (None, None)
    assert gone() is None
    assert accelerator.clear() == []


@on_ranks
def test_one_process_writes_for_all(folder: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_model(model, folder / "m")
    accelerator.save(accelerator.process_index, folder / "o")
    accelerator.wait_for_everyone()
    assert set(load_file(folder / "m" / "model.safetensors")) == {"weight", "bias"}
    assert torch.load(folder / "o", weights_only=True) == 0


@on_ranks
def test_the_main_process_of_each_machine_writes_where_folders_are_not_shared(folder: Path) -> None:
    accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=True))
    own = folder / str(accelerator.process_index)
    accelerator.save("x", own)
    assert own.exists() == accelerator.is_local_main_process


def test_folders_on_the_way_to_a_file_are_made(tmp_path: Path) -> None:
    Accelerator().save({"a": torch.ones(1)}, tmp_path / "not" / "there" / "last.pth")
    assert torch.load(tmp_path / "not" / "there" / "last.pth")["a"].item() == 1.0
