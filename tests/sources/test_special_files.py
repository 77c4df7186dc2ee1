"""What is no file under the name of a file of a model is refused, and is never opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bigmodel import from_pretrained
from bigmodel.checkpoint import Checkpoint
from bigmodel.errors import CheckpointFormatError
from bigmodel.sources.resolve import open_source
from bigmodel.sources.special_files import refuse_special_files


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # names of sockets are short


MAKERS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": bind_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "cannot be read": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_file_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MAKERS[kind](tmp_path / "config.json")
    with pytest.raises(CheckpointFormatError, match=rf"config\.json: (is )?{kind}"):
        refuse_special_files(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("opened", [open_source, Checkpoint.open, from_pretrained])
def test_a_fifo_beside_a_model_is_refused_before_anything_is_loaded(
    name: str, opened: Callable[[Path], object], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointFormatError, match=f"{name}: is a FIFO"):
        opened(tmp_path)
    with pytest.raises(CheckpointFormatError, match=f"{name}: is a FIFO"):
        opened(tmp_path / name)


def test_files_links_to_files_and_folders_of_other_names_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    (tmp_path / "missing.json").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "queue")
    refuse_special_files(tmp_path)
