"""Files that are there whole or not at all, read without running code."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigmodel.atomic_files import written_atomically
from bigmodel.errors import CheckpointFormatError, CheckpointNotFoundError, TrainError
from bigmodel.train.files.objects import load_object, numbered, save_object


class Own:
    pass


def test_names_are_numbered_from_the_second_on() -> None:
    assert [numbered("optimizer.bin", index) for index in range(3)] == [
        "optimizer.bin",
        "optimizer_1.bin",
        "optimizer_2.bin",
    ]


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
