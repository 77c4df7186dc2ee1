"""Checkpoint folders: whole, or not there."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from bigmodel.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from bigmodel.train import PartialState, checkpoint_folder
from tests.train.multiprocess import on_ranks


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.name != "checkpoint.json"}


def write(target: Path, **files: str) -> None:
    state = PartialState()
    with checkpoint_folder.replaced(target, state, state.is_main_process) as folder:
        if state.is_main_process:
            for name, text in files.items():
                (folder / name).write_text(text)
            checkpoint_folder.describe(folder, {"format": 1})


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "made" / "checkpoint"
    write(target, a="1", b="2")
    assert content(target) == {"a": "1", "b": "2"}
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint"]
    assert checkpoint_folder.description_of(target)["files"] == ["a", "b", "checkpoint.json"]


def test_a_failed_write_leaves_nothing_new(tmp_path: Path) -> None:
    state = PartialState()
    for target in (tmp_path / "new", tmp_path):
        with pytest.raises(OSError, match="full"), checkpoint_folder.replaced(target, state, True) as folder:
            (folder / "a").write_text("half")
            raise OSError("full")
        assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_gets_the_new_content_and_keeps_the_files_of_others(tmp_path: Path) -> None:
    write(tmp_path, a="1", old="1")
    (tmp_path / "mine").write_text("kept")
    write(tmp_path, a="2", new="2")
    assert content(tmp_path) == {"a": "2", "mine": "kept", "new": "2"}


@pytest.mark.parametrize("stop", range(6))
def test_whatever_was_moved_before_the_process_was_killed_recovery_finishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    write(tmp_path, a="1", b="1", old="1")
    done = []
    real = os.replace

    def replace_until_killed(source: Path, target: Path) -> None:
        if len(done) == stop:
            raise KeyboardInterrupt
        done.append(target)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_until_killed)
        with suppress(KeyboardInterrupt):
            write(tmp_path, a="2", b="2", c="2")
    checkpoint_folder.recover(tmp_path)
    old, new = {"a": "1", "b": "1", "old": "1"}, {"a": "2", "b": "2", "c": "2"}
    # The first two renames are those of the new description and of the list of moves.
    assert content(tmp_path) == (old if stop < 2 else new)
    checkpoint_folder.recover(tmp_path)
    assert content(tmp_path) == (old if stop < 2 else new)


def test_a_description_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    (tmp_path / "outside").write_text("kept")
    write(target, a="1")
    (target / "checkpoint.json").write_text(json.dumps({"files": ["../outside", "..", ".", "", "a", "/etc/passwd"]}))
    write(target, b="2")
    assert (tmp_path / "outside").read_text() == "kept"
    assert content(target) == {"b": "2"}


def test_a_list_of_moves_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    write(target, a="1")
    outside = tmp_path / "outside"
    outside.write_text("kept")
    work = {"remove": ["../outside", str(outside), ".."], "move": ["../../outside", "..", str(outside)]}
    (target / ".moves.json").write_text(json.dumps(work))
    checkpoint_folder.recover(target)
    assert outside.read_text() == "kept"
    assert content(target) == {"a": "1"}


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_damaged_description_or_list_is_said_to_be_one(tmp_path: Path, text: str) -> None:
    for name, read in (
        ("checkpoint.json", checkpoint_folder.description_of),
        (".moves.json", checkpoint_folder.recover),
    ):
        (tmp_path / name).write_text(text, errors="surrogateescape")
        with pytest.raises(CheckpointFormatError, match=name):
            read(tmp_path)


def test_the_newest_is_that_with_the_highest_number(tmp_path: Path) -> None:
    for number in (2, 10, 9):
        write(tmp_path / f"checkpoint_{number}", a="1")
    (tmp_path / "checkpoint_x").mkdir()
    (tmp_path / "checkpoint_99").write_text("a file")
    assert checkpoint_folder.newest(tmp_path).name == "checkpoint_10"
    assert checkpoint_folder.number_of(tmp_path / "checkpoint_9") == 9
    assert checkpoint_folder.number_of(tmp_path / "other") is None
    checkpoint_folder.remove_oldest(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint_10",
        "checkpoint_9",
        "checkpoint_99",
        "checkpoint_x",
    ]


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint in"):
            checkpoint_folder.newest(folder)


@on_ranks
def test_all_processes_write_into_one_folder(folder: Path) -> None:
    state = PartialState()
    with checkpoint_folder.replaced(folder / "c", state, state.is_main_process) as partial:
        (partial / f"rank{state.process_index}").write_text("x")
    assert content(folder / "c") == {"rank0": "x", "rank1": "x"}


@on_ranks
def test_when_one_process_fails_all_do_and_the_old_checkpoint_stays(folder: Path) -> None:
    state = PartialState()
    write(folder / "c", a="1")
    expected = (OSError, "full") if state.process_index else (CheckpointError, "process 1 failed with OSError: full")
    with (
        pytest.raises(expected[0], match=expected[1]),
        checkpoint_folder.replaced(folder / "c", state, state.is_main_process) as partial,
    ):
        (partial / f"rank{state.process_index}").write_text("x")
        if state.process_index:
            raise OSError("full")
    state.wait_for_everyone()
    assert content(folder / "c") == {"a": "1"}


@on_ranks
def test_when_the_process_that_writes_for_all_cannot_make_or_move_the_folder_all_fail(folder: Path) -> None:
    state = PartialState()
    expected = CheckpointError if state.process_index else OSError
    (folder / "file").write_text("not a folder")
    with pytest.raises(expected), checkpoint_folder.replaced(folder / "file" / "c", state, state.is_main_process):
        raise AssertionError("there is no folder to write in")
    with (
        pytest.raises(expected),
        checkpoint_folder.replaced(folder / "taken", state, state.is_main_process) as partial,
    ):
        (partial / f"rank{state.process_index}").write_text("x")
        state.wait_for_everyone()
        if state.is_main_process:
            (folder / "taken").write_text("in the way")
    state.wait_for_everyone()
