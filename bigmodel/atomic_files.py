"""Atomic file writes: a file exists completely or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that is synchronized to disk and renamed to `path` when the body completes.

    Raises:
        OSError: the file cannot be written. Then, and when the body raises, an existing file stays unchanged and no
            temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, replacing what is there in one step; raises as `written_atomically` does."""
    with written_atomically(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
