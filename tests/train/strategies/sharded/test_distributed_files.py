"""Folders of shards: written and read in one process here; over ranks with the curves."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from bigmodel.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointNotFoundError
from bigmodel.train.strategies.sharded.distributed_files import load_folder, read_index, read_tensors, save_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, "lr": 0.1}
    save_folder(state, tmp_path / "shards")
    return tmp_path / "shards"


def test_tensors_and_numbers_come_back(folder: Path) -> None:
    state = {"model": {"a": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}, "lr": 0.0}
    load_folder(state, folder)
    assert torch.equal(state["model"]["a"], torch.arange(6.0).view(2, 3))
    assert state["lr"] == 0.1


def test_single_entries_can_be_read(folder: Path) -> None:
    assert list(read_tensors(folder, {"model.b"})["model"]) == ["b"]
    assert set(read_index(folder).state_dict_metadata) == {"model.a", "model.b", "lr"}


def test_a_tensor_that_does_not_fit_or_is_missing_is_said(folder: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="does not fit the model"):
        load_folder({"model": {"a": torch.zeros(9, 9)}}, folder)
    with pytest.raises(CheckpointMismatchError, match="does not fit the model"):
        load_folder({"model": {"c": torch.zeros(1)}}, folder)
    load_folder({"model": {"c": torch.zeros(1)}}, folder, strict=False)


def test_a_folder_without_an_index_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"it has no \.metadata file"):
        load_folder({}, tmp_path)


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize("content", [pickle.dumps(Harm()), b"", b"\x80\x04garbage", pickle.dumps({"a": 1})])
def test_a_hostile_or_damaged_index_is_refused_and_runs_nothing(
    folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointFormatError):
        load_folder({"lr": 0.0}, folder)
    assert not (folder / "harmed").exists()


def test_an_index_that_points_outside_its_folder_is_refused(folder: Path) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match="points outside its folder"):
        load_folder({"lr": 0.0}, folder)
