from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from bigmodel.atomic_files import sync_folder, write_text, written_atomically


def test_what_was_there_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_with_the_file_also_where_pytorch_hides_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: .*{path}"), written_atomically(path) as file:
            torch.save({"weight": torch.zeros(10_000)}, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_body_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="told"), written_atomically(tmp_path / "file"):
        try:
            raise OSError("not found")
        except OSError as error:
            raise RuntimeError("told") from error


def test_a_file_has_no_name_before_its_body_is_done(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with written_atomically(path) as file:
        file.write(b"half")
        assert not path.exists()
    assert path.read_bytes() == b"half"
    with pytest.raises(KeyboardInterrupt), written_atomically(path) as file:
        file.write(b"other")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"half"
    assert list(tmp_path.iterdir()) == [path]


def test_only_a_folder_that_is_there_can_be_synchronised(tmp_path: Path) -> None:
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "nowhere")
