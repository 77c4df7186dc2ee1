"""Refuses what lies in a model's folder under the name of a file and is none: a FIFO, a socket, a device, a folder.

Opening a FIFO waits for a writer, which may never come, and a device such as ``/dev/zero`` has no end. Other libraries
open files of the same folder by their names, so that all of them are checked, before one is opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import CheckpointFormatError

_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Ends of the names that files of a model have: configs, tokenizers, weights."""

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def refuse_special_files(path: Path) -> None:
    """Check a checkpoint's file and the files beside it, or the files in its folder; a missing one is no error.

    Raises:
        CheckpointFormatError: one of them is no file, or a link that leads to itself.
    """
    if path.is_dir():
        for entry in os.scandir(path):
            if entry.name.endswith(_SUFFIXES) and not os.path.isfile(entry.path):
                _refuse(Path(entry.path), folders=entry.name.endswith(".json"))
        return
    _refuse(path, folders=False)
    if path.parent.is_dir():
        refuse_special_files(path.parent)


def _refuse(path: Path, folders: bool) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:  # a broken link: whoever needs the file says so
        return
    except OSError as error:
        raise CheckpointFormatError(f"{path}: cannot be read ({error.strerror}); put the file itself there") from error
    kind = next((name for test, name in _KINDS if test(mode)), None)
    if kind is not None and (folders or kind != "a folder"):
        raise CheckpointFormatError(f"{path}: is {kind}, not a file; put the file there, or remove it")
