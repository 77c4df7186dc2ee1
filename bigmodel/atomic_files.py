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
        OSError: the file cannot be written, also where `torch.save` raises another error for it. Then, and when the
            body raises, an existing file stays unchanged and no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        reason = _reason_of(error)
        if reason is None:
            raise
        if reason.errno is not None and reason.filename is None:
            reason.filename = str(path)
        raise reason from None
    finally:
        temporary.unlink(missing_ok=True)


def _reason_of(error: OSError | RuntimeError) -> OSError | None:
    """Return the error of a failed write: the writer of `torch.save` raises one of its own as it ends its archive."""
    reason = error if isinstance(error, OSError) or error.__cause__ else error.__context__
    return reason if isinstance(reason, OSError) else None


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
