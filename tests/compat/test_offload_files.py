"""Accelerate's folder of offloaded weights: what is written is read again, as views of the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.compat import offload_files
from bigmodel.errors import CheckpointError

STATE = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.half": torch.ones(2, dtype=torch.bfloat16),
    "ab.scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    offload_files.offload_state_dict(tmp_path / "new", STATE)
    return tmp_path / "new"


def test_the_index_says_dtype_and_shape(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    assert index["a.weight"] == {"dtype": "float32", "shape": [2, 3]}
    assert index["ab.scalar"] == {"dtype": "int64", "shape": []}
    assert sorted(path.name for path in folder.glob("*.dat")) == sorted(f"{name}.dat" for name in STATE)


def test_tensors_are_read_as_they_were(folder: Path) -> None:
    loader = offload_files.OffloadedWeightsLoader(save_folder=folder)
    assert list(loader) == list(STATE)
    for name, value in STATE.items():
        assert loader[name].dtype == value.dtype
        assert torch.equal(loader[name], value)


def test_a_state_dict_is_before_files(folder: Path) -> None:
    loader = offload_files.OffloadedWeightsLoader({"a.half": torch.zeros(1)}, folder)
    assert loader["a.half"].tolist() == [0]
    assert (len(loader), next(iter(loader))) == (len(STATE), "a.half")
    with pytest.raises(ValueError, match="give a state_dict, a save_folder or an index"):
        offload_files.OffloadedWeightsLoader()


def test_a_file_of_safetensors_may_be_named_and_cast(tmp_path: Path) -> None:
    save_file({"old": torch.ones(2)}, tmp_path / "model.safetensors")
    entry = {"safetensors_file": str(tmp_path / "model.safetensors"), "weight_name": "old", "dtype": "float16"}
    found = offload_files.OffloadedWeightsLoader(index={"new": entry}, device="cpu")["new"]
    assert (found.dtype, found.tolist()) == (torch.float16, [1, 1])
    stored = offload_files.stored_tensor("new", entry, {})
    assert stored.dtype == torch.float32
    assert offload_files.wanted_dtype(entry, stored) == torch.float16
    assert offload_files.wanted_dtype({}, stored) == torch.float32


def test_the_part_of_a_module_has_its_own_names(folder: Path) -> None:
    part = offload_files.PrefixedDataset(offload_files.OffloadedWeightsLoader(save_folder=folder), "a.")
    assert (list(part), len(part)) == (["weight", "half"], 2)
    assert torch.equal(part["weight"], STATE["a.weight"])
    named = offload_files.extract_submodules_state_dict(STATE, ["a", "empty"])
    assert list(named) == ["a.weight", "a.half", "empty"]


def test_weights_are_put_into_a_model(folder: Path) -> None:
    model = nn.Module()
    model.a = nn.Linear(3, 2, bias=False, device="meta")
    index = json.loads((folder / "index.json").read_text())
    offload_files.load_offloaded_weights(model, {"a.weight": index["a.weight"]}, folder)
    assert isinstance(model.a.weight, nn.Parameter)
    assert torch.equal(model.a.weight, STATE["a.weight"])
    offload_files.load_offloaded_weights(model, None, folder)


def test_an_index_is_added_to_the_one_that_is_there(folder: Path) -> None:
    index = offload_files.offload_weight(torch.ones(1), "late", folder, {})
    offload_files.save_offload_index(index, folder)
    offload_files.save_offload_index({}, folder)
    assert offload_files.offload_weight(torch.ones(1), "late", folder) is None
    assert set(offload_files.OffloadedWeightsLoader(save_folder=folder)) == {*STATE, "late"}


def test_a_file_of_another_size_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has 24 bytes, but .* takes 16"):
        offload_files.load_offloaded_weight(folder / "a.weight.dat", {"dtype": "float32", "shape": [4]})
    with pytest.raises(CheckpointError, match="'no' is not a dtype"):
        offload_files.load_offloaded_weight(folder / "a.weight.dat", {"dtype": "no", "shape": [4]})
