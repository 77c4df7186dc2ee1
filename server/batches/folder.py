"""The folder of files and batches: one that was given, for one server at a time, or one that goes with the server."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from bigmodel.atomic_files import sync_folder, write_text
from bigmodel.errors import ServeError
from bigmodel.server.batches.records import Record

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

_SUFFIX = ".json"


class BatchFolder:
    """The folder, and a lock of it.

    Attributes:
        files: Where files are.
        batches: Where batches are.

    Raises:
        ServeError: It cannot be used, or another server uses it.
    """

    def __init__(self, given: Path | None) -> None:
        self._temporary = given is None
        self._descriptor = -1
        try:
            self._root = Path(tempfile.mkdtemp(prefix="bigmodel-batches-")) if given is None else given.expanduser()
            self.files, self.batches = self._root / "files", self._root / "batches"
            for path in (self._root, self.files, self.batches):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock()
            for path in (self.files, self.batches):
                for left in path.glob(".*.tmp"):  # by a process that was killed while it wrote
                    left.unlink()
        except OSError as error:
            self.close()
            raise ServeError(f"batches: {self._root} cannot be used: {error.strerror}") from error

    def _lock(self) -> None:
        self._descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServeError(f"batches: another server uses {self._root}; give another folder") from None

    def close(self) -> None:
        """Let another server use it; remove it if it is this server's own. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._temporary:
                shutil.rmtree(self._root, ignore_errors=True)


def read_records(folder: Path, kind: type[R]) -> Iterator[R]:
    """Yield the records in a folder, the oldest first; one that cannot be read is left alone, and logged."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            found = kind.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            logger.warning("%s is left out: %s", path, error)
            continue
        if found.id == path.stem:
            yield found


def write_record(folder: Path, record: Record) -> None:
    """Write a record, which is on disk afterwards."""
    write_text(folder / f"{record.id}{_SUFFIX}", record.model_dump_json())
    sync_folder(folder)


def remove_record(folder: Path, name: str) -> None:
    """Remove the record of this id, if there is one."""
    with suppress(FileNotFoundError):
        (folder / f"{name}{_SUFFIX}").unlink()
