from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigmodel.profile.atomic import write_text


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
