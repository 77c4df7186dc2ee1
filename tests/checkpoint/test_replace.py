"""A folder is looked at after every single change to the file system: it loads as the old checkpoint or the new one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bigmodel.checkpoint import Checkpoint, replace, save_model
from bigmodel.errors import CheckpointError
from tests.checkpoint.helpers import assert_same, same_bits

OLD = {name: torch.zeros(8) for name in "abcd"}
NEW = {name: torch.ones(8) for name in "abcd"}
LAYOUTS = {"single": "1GB", "two_shards": 64, "four_shards": 32}


class Crash(BaseException):
    """The machine stops here."""


def values(folder: Path) -> float:
    """0 if the folder loads as the old checkpoint, 1 if as the new one; anything else is a mixture."""
    tensors = dict(Checkpoint.open(folder))
    assert set(tensors) == set(OLD)
    found = {float(tensor.mean()) for tensor in tensors.values()}
    assert len(found) == 1
    return found.pop()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[float]]:
    """Look at a folder before and after every rename and removal."""

    def start(folder: Path) -> list[float]:
        seen: list[float] = []

        def watched(original: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: object, **options: object) -> None:
                seen.append(values(folder))
                original(*arguments, **options)
                seen.append(values(folder))

            return call

        for name in ("rename", "replace", "unlink"):
            monkeypatch.setattr(os, name, watched(getattr(os, name)))
        return seen

    return start


def test_an_index_that_names_other_files_does_not_make_them_go(tmp_path: Path) -> None:
    save_model(OLD, tmp_path, LAYOUTS["two_shards"])
    notes, index = tmp_path / "notes.txt", tmp_path / "model.safetensors.index.json"
    notes.write_text("mine")
    shard = next(tmp_path.glob("*-00002-of-*.safetensors")).name
    index.write_text(index.read_text().replace(shard, notes.name))
    save_model(NEW, tmp_path)
    assert notes.read_text() == "mine"
    assert values(tmp_path) == 1


@pytest.mark.parametrize("safe_new", [True, False], ids=["to_safe", "to_legacy"])
@pytest.mark.parametrize("safe_old", [True, False], ids=["from_safe", "from_legacy"])
@pytest.mark.parametrize("new", LAYOUTS)
@pytest.mark.parametrize("old", LAYOUTS)
def test_at_every_moment_the_folder_is_the_old_or_the_new_checkpoint(
    tmp_path: Path, watch: Callable[[Path], list[float]], old: str, new: str, safe_old: bool, safe_new: bool
) -> None:
    save_model(OLD, tmp_path, LAYOUTS[old], safe_old)
    (tmp_path / "tokenizer.json").write_text("{}")
    seen = watch(tmp_path)
    save_model(NEW, tmp_path, LAYOUTS[new], safe_new)
    assert seen[0] == 0
    assert seen[-1] == 1
    assert seen == sorted(seen), "once new, always new"
    files = {path.name for path in tmp_path.iterdir()}
    checkpoint = Checkpoint.open(tmp_path)
    leftover = files - {"tokenizer.json", checkpoint.path.name, *checkpoint.shards}
    assert all(name.startswith("pytorch_model") for name in leftover), leftover
    assert not leftover or (safe_new and not safe_old), "only files that are never preferred may stay"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [("single", "single"), ("single", "two_shards"), ("two_shards", "four_shards"), ("four_shards", "single")],
)
def test_a_crash_at_any_step_can_be_saved_over(tmp_path: Path, old: str, new: str) -> None:
    step = 0
    while True:
        folder = tmp_path / str(step)
        save_model(OLD, folder, LAYOUTS[old])
        with pytest.MonkeyPatch.context() as patch:
            crashed = crash_at(patch, step)
            with contextlib.suppress(Crash):
                save_model(NEW, folder, LAYOUTS[new])
            if not crashed():
                break
        assert values(folder) in (0, 1)
        save_model(NEW, folder, LAYOUTS[new])
        checkpoint = Checkpoint.open(folder)
        assert_same(checkpoint, NEW)
        assert {path.name for path in folder.iterdir()} == {checkpoint.path.name, *checkpoint.shards}
        step += 1
    assert step >= 4


def crash_at(patch: pytest.MonkeyPatch, step: int) -> Callable[[], bool]:
    """Stop before the step-th change to the file system, and do none after it: not even the cleaning up."""
    count = 0

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count > step:
                raise Crash
            return original(*arguments, **options)

        return call

    for name in ("rename", "replace", "unlink", "fsync"):
        patch.setattr(os, name, counted(getattr(os, name)))
    patch.setattr(shutil, "rmtree", lambda *_, **__: None)
    return lambda: count > step


def test_an_error_while_writing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(OLD, tmp_path, 32)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(NEW, tmp_path, 32)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_new_shards_never_bear_the_names_of_old_ones(tmp_path: Path) -> None:
    save_model(OLD, tmp_path, 64)
    first = set(Checkpoint.open(tmp_path).shards)
    save_model(NEW, tmp_path, 64)
    second = set(Checkpoint.open(tmp_path).shards)
    assert not first & second
    save_model(OLD, tmp_path, 64)
    assert set(Checkpoint.open(tmp_path).shards) == first, "names are plain again where they are free"


def test_other_files_stay(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "adapter_model.safetensors", "pytorch_model.bin", "notes-00001-of-00002.txt"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "checkpoint-5").mkdir()
    save_model(OLD, tmp_path, 64)
    save_model(NEW, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "tokenizer.json",
        "adapter_model.safetensors",
        "pytorch_model.bin",
        "notes-00001-of-00002.txt",
        "checkpoint-5",
        "model.safetensors",
    }
    assert same_bits(Checkpoint.open(tmp_path).tensor("a"), NEW["a"])


def test_shards_of_other_names_that_the_old_index_names_are_removed(tmp_path: Path) -> None:
    save_model(OLD, tmp_path, 64)
    first = sorted(Checkpoint.open(tmp_path).shards)[0]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first, "part-a.safetensors"))
    (tmp_path / first).rename(tmp_path / "part-a.safetensors")
    assert values(tmp_path) == 0
    save_model(NEW, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors"}


def test_a_damaged_old_index_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    save_model(NEW, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors"}


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_model(OLD, tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/model.safetensors")
    save_model(NEW, tmp_path / "snapshot", 64)
    assert values(tmp_path / "snapshot") == 1
    assert values(tmp_path / "blobs") == 0


def test_a_file_that_would_hide_a_legacy_save_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"holds weights\.safetensors, which would be loaded instead"):
        save_model(NEW, tmp_path, safe_serialization=False)
    assert {path.name for path in tmp_path.iterdir()} == {"weights.safetensors"}


def test_files_of_an_interrupted_save_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / f"{replace._PREFIX}dead").mkdir()
    (tmp_path / f"{replace._PREFIX}dead" / "model.safetensors").touch()
    (tmp_path / "model-0123abcd-00001-of-00002.safetensors").touch()
    save_model(NEW, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors"}
