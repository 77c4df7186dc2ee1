"""Files for keys and values whose RAM would pass the host's budget: unlinked from the start, and cut into ranges.

No other process sees such a file, and its space is freed by the kernel however this process ends. The space of a range
is given back as soon as its rows are forgotten. Ranges are written with `pwrite`. A private map of the file says to
`DiskReader` where rows are; they are never touched through it, as a disk that fails would terminate the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ...checkpoint.mapping import MappedFile
from ...devices import format_size
from ...devices.forks import new_rlock
from ...errors import CheckpointFormatError, DispatchError, KVDiskError
from ...limits import FILE_ALIGNMENT
from ..transfer.page_cache import ReadPolicy

_PUNCH_HOLE, _KEEP_SIZE = 2, 1
"""Flags of `fallocate`: give the space back, and leave the file as long as it is."""

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class KVRange:
    """Bytes of a file; they are given back when this object is garbage-collected.

    Args:
        file: The file.
        offset: Where they begin, a multiple of `FILE_ALIGNMENT`.
        nbytes: How many there are.
    """

    def __init__(self, file: KVFile, offset: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._file = file
        self._offset = offset
        weakref.finalize(self, file.give, offset, nbytes).atexit = False

    def write(self, at: int, rows: torch.Tensor) -> None:
        """Write a contiguous host tensor at byte `at` of the range."""
        self._file.write(self._offset + at, rows)

    def read(self, at: int, rows: torch.Tensor) -> None:
        """Read the bytes from `at` on into a contiguous host tensor."""
        self._file.read(self._offset + at, rows)

    def view(self, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor that says to a `DiskReader` where the bytes from `at` on are."""
        return self._file.map.tensor(dtype, shape, self._offset + at)


class KVFile:
    """One file. Threads may share it.

    Args:
        folder: Folder to make it in; it is created if it does not exist.
        nbytes: Bytes of all ranges together. The file is sparse until they are taken.
        policy: Decides whether what is written stays in the page cache.

    Raises:
        DispatchError: This is not Linux.
        KVDiskError: The file cannot be made.
    """

    def __init__(self, folder: Path, nbytes: int, policy: ReadPolicy) -> None:
        if sys.platform != "linux":
            raise DispatchError("keys and values on disk need Linux: give the host a larger budget")
        self._folder = folder
        self._policy = policy
        self._lock = new_rlock()  # a range may be collected in a thread that holds it
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (it lives as long as this)
            os.ftruncate(self._file.fileno(), nbytes)
        except OSError as error:
            raise self._failure(error, nbytes) from error
        # Through /proc: the file has no name.
        self.map = MappedFile(Path(f"/proc/self/fd/{self._file.fileno()}"))
        self._free = [(0, nbytes)]

    def take(self, nbytes: int) -> KVRange | None:
        """Return a range of at least `nbytes` bytes with space on the disk; None if the file has none left.

        Raises:
            KVDiskError: The disk is full.
        """
        nbytes = aligned(nbytes)
        with self._lock:
            at = next((at for at, (_, size) in enumerate(self._free) if size >= nbytes), None)
            if at is None:
                return None
            offset, size = self._free.pop(at)
            if size > nbytes:
                self._free.insert(at, (offset + nbytes, size - nbytes))
        try:
            os.posix_fallocate(self._file.fileno(), offset, nbytes)
        except OSError as error:
            self.give(offset, nbytes)
            raise self._failure(error, nbytes) from error
        return KVRange(self, offset, nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Take a range back, and free its space on the disk where the file system can."""
        self.punch(offset, nbytes)
        with self._lock:
            merged: list[tuple[int, int]] = []
            for begin, size in sorted([*self._free, (offset, nbytes)]):
                if merged and sum(merged[-1]) == begin:
                    merged[-1] = merged[-1][0], merged[-1][1] + size
                else:
                    merged.append((begin, size))
            self._free = merged

    def punch(self, offset: int, nbytes: int) -> None:
        """Free the space of bytes on the disk where the file system can; they are zeros then."""
        if _libc is not None:
            _libc.fallocate(self._file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes)

    def write(self, offset: int, rows: torch.Tensor) -> None:
        """Write a contiguous host tensor at byte `offset`; see `write_all`."""
        self.write_all([(offset, rows)])

    def write_all(self, placed: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Write contiguous host tensors, each at a byte. Where the rows of all layers would not stay in the page cache
        anyway, they leave it at once.

        Raises:
            KVDiskError: The disk cannot be written.
        """
        contents = [(at, _bytes(rows)) for at, rows in placed]
        descriptor = self._file.fileno()
        try:
            for offset, content in contents:
                done = 0
                while done < len(content):
                    done += os.pwrite(descriptor, content[done:], offset + done)
            if not self._policy.all_fits():
                os.fdatasync(descriptor)
                for offset, content in contents:
                    os.posix_fadvise(descriptor, offset, len(content), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failure(error, sum(len(content) for _, content in contents)) from error

    def read(self, offset: int, rows: torch.Tensor) -> None:
        """Read the bytes from `offset` on into a contiguous host tensor; they leave the page cache as in `write_all`.

        Raises:
            KVDiskError: The disk cannot be read.
        """
        content, descriptor, done = _bytes(rows), self._file.fileno(), 0
        with reading():
            while done < len(content):
                count = os.preadv(descriptor, [content[done:]], offset + done)
                if not count:
                    raise CheckpointFormatError(f"the file ends at byte {offset + done}")
                done += count
            if not self._policy.all_fits():
                os.posix_fadvise(descriptor, offset, len(content), os.POSIX_FADV_DONTNEED)

    @property
    def space(self) -> int:
        """Bytes that the file takes on the disk."""
        return os.fstat(self._file.fileno()).st_blocks * 512

    def _failure(self, error: OSError, nbytes: int) -> KVDiskError:
        return KVDiskError(
            f"{self._folder}: {format_size(nbytes)} of keys and values cannot be written to disk ({error.strerror}); "
            "free space there, give another offload folder, or plan for a shorter context",
            error.strerror or "the disk failed",
        )


class KVDisk:
    """The files of one model's keys and values: one of the planned bytes, and others where caches need more.

    Args:
        folder: Folder for them.
        planned: Bytes that the plan has on disk.
    """

    def __init__(self, folder: Path, planned: int) -> None:
        self.policy = ReadPolicy(planned)
        self.files: list[KVFile] = []
        self._sparse: weakref.WeakSet[KVFile] = weakref.WeakSet()
        self._folder = folder
        self._planned = planned
        self._lock = new_rlock()

    def take(self, nbytes: int) -> KVRange:
        """Return a new range of at least `nbytes` bytes.

        Raises:
            KVDiskError: The disk is full.
        """
        with self._lock:
            for file in self.files:
                found = file.take(nbytes)
                if found is not None:
                    return found
            self.files.append(KVFile(self._folder, max(self._planned, aligned(nbytes)), self.policy))
            found = self.files[-1].take(nbytes)
            assert found is not None
            return found

    def sparse(self, nbytes: int) -> KVFile:
        """Return a new file of `nbytes` bytes for one caller, without space on the disk until they are written. It is
        gone with the caller.

        Raises:
            KVDiskError: It cannot be made.
        """
        made = KVFile(self._folder, nbytes, self.policy)
        with self._lock:
            self._sparse.add(made)
        return made

    @property
    def space(self) -> int:
        """Bytes that all files take on the disk."""
        with self._lock:
            return sum(file.space for file in (*self.files, *self._sparse))


@contextmanager
def reading() -> Iterator[None]:
    """Have errors within this context say that keys and values cannot be read."""
    try:
        yield
    except (OSError, CheckpointFormatError) as error:
        known = isinstance(error, OSError) and error.errno  # its text may speak of weights
        why = os.strerror(known) if known else "the file of them ends too early"
        # Its read keeps the error: with a traceback, that would hold what the failed step holds, pages among it.
        raise KVDiskError(f"keys and values cannot be read from disk ({why})", why) from error.with_traceback(None)


def _bytes(rows: torch.Tensor) -> memoryview:
    return memoryview(rows.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to a multiple of `FILE_ALIGNMENT`."""
    return -(-nbytes // FILE_ALIGNMENT) * FILE_ALIGNMENT
