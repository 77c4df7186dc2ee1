"""Files of clients in a folder, bounded in number and bytes. Names in the folder are this server's, never a client's.

A file is two: its bytes, and a record that is written once they are complete and on disk. Bytes without a record are
those of a file that is being written, and nobody sees it. Methods may be called from any thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO, Literal

from bigmodel.server.batches.folder import read_records, remove_record, write_record
from bigmodel.server.batches.limits import BatchLimits, FileInUseError, FileTooLongError, StoreFullError
from bigmodel.server.batches.records import StoredFile, new_id, now

_SUFFIX = ".data"


class FileStore:
    """The files of a folder.

    Args:
        folder: Where they are.
        limits: Their bounds.

    Attributes:
        in_use: Whether an unfinished batch needs the file of an id.
    """

    def __init__(self, folder: Path, limits: BatchLimits) -> None:
        self.limits = limits
        self.in_use: Callable[[str], bool] = lambda file_id: False
        self._folder = folder
        self._lock = threading.Lock()
        self._files = {file.id: file for file in read_records(folder, StoredFile) if self.path(file.id).is_file()}
        self._sizes = {file.id: file.bytes for file in self._files.values()}  # pending files included
        self._owners = {file.id: file.owner for file in self._files.values()}  # likewise

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, pending ones included."""
        return sum(self._sizes.values())

    def path(self, file_id: str) -> Path:
        """Where the bytes of one of its files are."""
        return self._folder / f"{file_id}{_SUFFIX}"

    def get(self, owner: str, file_id: str) -> StoredFile | None:
        """The file of this id, if this owner has one."""
        found = self._files.get(file_id)
        return None if found is None or found.owner != owner or found.expired else found

    def of(self, owner: str) -> list[StoredFile]:
        """The files of an owner, the oldest first."""
        with self._lock:
            found = list(self._files.values())
        return sorted((file for file in found if file.owner == owner and not file.expired), key=lambda file: file.id)

    def delete(self, file: StoredFile) -> None:
        """Delete a file. Raises FileInUseError where a batch needs it."""
        if self.in_use(file.id):
            raise FileInUseError(f"{file.id} is the input of a batch that has not ended; cancel that first")
        self._remove(file.id)

    def delete_expired(self) -> None:
        """Delete the files whose time has passed, but for those that batches need."""
        with self._lock:
            expired = [file.id for file in self._files.values() if file.expired]
        for file_id in expired:
            if not self.in_use(file_id):
                self._remove(file_id)

    def delete_unknown(self, pending: Collection[str]) -> None:
        """Delete bytes that have no record, but for those of the files that batches are about to go on with."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path.stem not in self._files and path.stem not in pending:
                path.unlink()

    # --- files that are being written ------------------------------------------------------------------

    def begin(self, owner: str, most_bytes: int | None = None) -> PendingFile:
        """Begin a new file of at most so many bytes. Raises StoreFullError where there are too many files."""
        self.delete_expired()
        return self._pending(new_id("file-"), owner, most_bytes)

    def reopen(self, file_id: str, owner: str) -> PendingFile:
        """Go on with a file that an earlier run has begun, or begin it. Nobody sees it until it is published.

        What there is already has its place. Raises StoreFullError where another file has none.
        """
        with self._lock:
            self._files.pop(file_id, None)
            self._sizes.pop(file_id, None)
        remove_record(self._folder, file_id)
        return self._pending(file_id, owner, None)

    def _pending(self, file_id: str, owner: str, most_bytes: int | None) -> PendingFile:
        with self._lock:
            own = sum(each == owner for each in self._owners.values())
            if not self.path(file_id).exists():
                if len(self._sizes) >= self.limits.files:
                    raise StoreFullError(f"there are {len(self._sizes)} files, as many as there may be; delete some")
                if owner and own >= self.limits.share * self.limits.files:
                    raise StoreFullError(f"this key has {own} files, as many as one may have; delete some")
            self._sizes[file_id] = 0
            self._owners[file_id] = owner
        try:
            return PendingFile(self, file_id, owner, most_bytes)
        except BaseException:
            self._sizes.pop(file_id, None)
            self._owners.pop(file_id, None)
            raise

    def _grow(self, file_id: str, size: int) -> None:
        """Count the bytes that a pending file is to have."""
        with self._lock:
            before, owner = self._sizes.get(file_id, 0), self._owners.get(file_id, "")
            own = sum(self._sizes.get(each, 0) for each, of in self._owners.items() if of == owner)
            most = int(self.limits.share * self.limits.total_bytes)
            if owner and own - before + size > most:
                raise StoreFullError(f"all files of this key together may have {most} bytes; delete some")
            if self.total_bytes - before + size > self.limits.total_bytes:
                raise StoreFullError(
                    f"all files together may have {self.limits.total_bytes} bytes, and there is no place for more; "
                    "delete some"
                )
            self._sizes[file_id] = size

    def _count(self, file_id: str, size: int) -> None:
        """Count the bytes that a pending file has."""
        with self._lock:
            self._sizes[file_id] = size

    def _publish(self, file: StoredFile) -> None:
        write_record(self._folder, file)
        with self._lock:
            self._files[file.id] = file

    def _remove(self, file_id: str) -> None:
        with self._lock:
            self._files.pop(file_id, None)
        # In this order: a process that is killed in between leaves bytes without a record.
        remove_record(self._folder, file_id)
        self.path(file_id).unlink(missing_ok=True)
        with self._lock:
            self._sizes.pop(file_id, None)
            self._owners.pop(file_id, None)


class PendingFile:
    """A file that is being written. Exactly one of `publish`, `discard` and `close` ends it.

    Attributes:
        id: What it will be called.
        size: Its bytes so far.
    """

    def __init__(self, store: FileStore, file_id: str, owner: str, most_bytes: int | None) -> None:
        self.id = file_id
        self._owner = owner
        self._store = store
        self._most_bytes = most_bytes
        descriptor = os.open(store.path(file_id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "r+b", buffering=0)
        self.size = self._file.seek(0, os.SEEK_END)
        store._count(file_id, self.size)

    def complete_lines(self, seen: Callable[[bytes], None] | None = None) -> list[bytes]:
        """The first 128 bytes of each line; ``seen`` is given it whole. What follows the last complete one is cut off.

        That is what a process wrote when it was killed.
        """
        found, complete = [], 0
        with open(self._store.path(self.id), "rb") as file:
            while line := file.readline():
                if not line.endswith(b"\n"):
                    break
                complete += len(line)
                found.append(line[:128])
                if seen is not None:
                    seen(line)
        self._file.truncate(complete)
        self.size = self._file.seek(complete)
        self._store._count(self.id, self.size)
        return found

    def write(self, data: bytes) -> None:
        """Append bytes: all, or none.

        Raises:
            FileTooLongError: The file would have more than it may.
            StoreFullError: All files together would.
            OSError: They cannot be written.
        """
        size = self.size + len(data)
        if self._most_bytes is not None and size > self._most_bytes:
            raise FileTooLongError(f"the file has more than {self._most_bytes} bytes")
        self._store._grow(self.id, size)
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(self.size)
            self._file.seek(self.size)
            self._store._count(self.id, self.size)
            raise
        self.size = size

    def publish(
        self, filename: str, purpose: Literal["batch", "batch_output"], seconds: int | None = None
    ) -> StoredFile:
        """Make it a file of its owner, which expires after so many seconds."""
        os.fsync(self._file.fileno())
        self._file.close()
        created = now()
        made = StoredFile(
            id=self.id,
            owner=self._owner,
            created_at=created,
            expires_at=None if seconds is None else created + seconds,
            bytes=self.size,
            filename=filename,
            purpose=purpose,
        )
        self._store._publish(made)
        return made

    def discard(self) -> None:
        """Delete it."""
        self._file.close()
        self._store._remove(self.id)

    def close(self) -> None:
        """Leave it as it is, for a later run."""
        self._file.close()
