"""Checkpoint files: written atomically, read without running code."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bigmodel.atomic_files import written_atomically
from bigmodel.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointNotFoundError, TrainError
from bigmodel.train.checkpoint_files import load_into, load_object, load_weights, numbered, save_object, save_weights


class Own:
    pass


def test_names_are_numbered_from_the_second_on() -> None:
    assert [numbered("optimizer.bin", index) for index in range(3)] == [
        "optimizer.bin",
        "optimizer_1.bin",
        "optimizer_2.bin",
    ]


@pytest.mark.usefixtures("accelerators")
def test_tensors_of_a_virtual_accelerator_are_written_as_host_tensors(tmp_path: Path) -> None:
    save_object({"state": {0: {"exp_avg": torch.ones(2).to("virtual:0")}}}, tmp_path / "o")
    back = load_object(tmp_path / "o")["state"][0]["exp_avg"]
    assert back.device.type == "cpu"
    assert back.tolist() == [1, 1]


def test_plain_objects_come_back(tmp_path: Path) -> None:
    obj: Any = OrderedDict(x=torch.ones(2), n=[1, 2.5, None, True, "s"], t=(1, {"k": {3}}), f=np.float64(0.5))
    save_object(obj, tmp_path / "o")
    back = load_object(tmp_path / "o")
    assert torch.equal(back.pop("x"), obj.pop("x"))
    assert back == obj


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"o would hold objects of .*Own"):
        save_object({"x": Own()}, tmp_path / "o")
    assert list(tmp_path.iterdir()) == []


def test_a_class_the_user_allows_is_written_and_read(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Own]):
        save_object(Own(), tmp_path / "o")
        assert isinstance(load_object(tmp_path / "o"), Own)


def test_a_file_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save(Evil(), tmp_path / "torch")
    (tmp_path / "pickle").write_bytes(pickle.dumps(Evil()))
    for name in ("torch", "pickle"):
        with pytest.raises(CheckpointFormatError, match=name):
            load_object(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    save_object(torch.ones(100), tmp_path / "o")
    whole = (tmp_path / "o").read_bytes()
    (tmp_path / "o").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointFormatError, match="o cannot be read"):
        load_object(tmp_path / "o")
    with pytest.raises(CheckpointNotFoundError, match="missing is not there"):
        load_object(tmp_path / "missing")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "o"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="full"), written_atomically(path) as file:
        file.write(b"new")
        raise OSError("full")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["o"]


@pytest.mark.slow
def test_whatever_the_damage_it_is_said_that_the_file_is_damaged(tmp_path: Path) -> None:
    """Of each byte of the pickle in it: a damaged one is refused, or means something else."""
    path = tmp_path / "o"
    save_object({"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}, path)
    whole = path.read_bytes()
    begin = whole.index(b"\x80\x02")
    refused = 0
    for position in range(begin, whole.index(b"PK", begin)):
        for value in (ord("h"), ord("0")):  # opcodes: look up what was stored, drop what is on the stack
            path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                load_object(path)
            except CheckpointFormatError:
                refused += 1
    assert refused > 100


class Tied(nn.Module):
    """Tied weights, a buffer, a scalar, and state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.narrow = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))
        self.extra = "none"

    def get_extra_state(self) -> Any:
        return {"text": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["text"]


@pytest.mark.usefixtures("accelerators")
def test_of_an_accelerator_tied_tensors_and_no_others_are_written_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_weights(model.to("virtual:0").state_dict(), tmp_path, 0)
    found = load_weights(tmp_path, 0)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found.keys() - load_file(tmp_path / "model.safetensors").keys() == {"2.weight"}


@pytest.mark.parametrize("safe", [True, False])
def test_everything_comes_back_in_place(tmp_path: Path, safe: bool) -> None:
    model, other = Tied(), Tied()
    model.extra = "kept"
    save_weights(model.state_dict(), tmp_path, 1, safe_serialization=safe)
    pointers = {name: tensor.data_ptr() for name, tensor in other.named_parameters()}
    load_into(other, tmp_path, 1)
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, other.state_dict()[name])
    assert {name: tensor.data_ptr() for name, tensor in other.named_parameters()} == pointers
    assert other.head.weight is other.embed.weight
    assert other.extra == "kept"


def test_a_tied_weight_is_written_once_and_other_readers_can_read_it(tmp_path: Path) -> None:
    model = Tied()
    save_weights(model.state_dict(), tmp_path, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("embed.weight" in tensors) != ("head.weight" in tensors)
    assert set(load_weights(tmp_path, 0)) == set(model.state_dict())


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_of_another_shape_or_name_is_left_alone(tmp_path: Path, safe: bool) -> None:
    save_weights(nn.Linear(2, 3).state_dict(), tmp_path, 0, safe_serialization=safe)
    for other, says in ((nn.Linear(3, 3), r"weight: \(3, 2\) in the checkpoint, \(3, 3\)"), (nn.PReLU(), "not in the")):
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(CheckpointMismatchError, match=says):
            load_into(other, tmp_path, 0)
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_without_strictness_what_fits_is_read(tmp_path: Path) -> None:
    small, large = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save_weights(small.state_dict(), tmp_path, 0)
    load_into(large, tmp_path, 0, strict=False)
    assert torch.equal(large[0].weight, small[0].weight)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"neither model_1\.safetensors nor pytorch_model_1\.bin"):
        load_weights(tmp_path, 1)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint at all")
    with pytest.raises(CheckpointFormatError):
        load_weights(tmp_path, 0)


@pytest.mark.parametrize("tied", ["{", "[]", '{"b": 3}'])
def test_damaged_names_of_ties_are_said_to_be_damaged(tmp_path: Path, tied: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"tied": tied})
    with pytest.raises(CheckpointFormatError, match="tied"):
        load_weights(tmp_path, 0)


def test_a_file_of_something_else_than_weights_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointFormatError, match="holds a list instead of a state dict"):
        load_weights(tmp_path, 0)
