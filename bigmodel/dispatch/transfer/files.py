"""Files of weights: opened once, shared by all blocks, read directly from disk or viewed in the page cache."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from pathlib import Path

import torch

from ...checkpoint import MappedRegion, populate
from ...checkpoint.mapping import MappedFile
from ...errors import CheckpointError, CheckpointFormatError
from ...limits import FILE_ALIGNMENT

_DIRECT = getattr(os, "O_DIRECT", 0)


class SourceFile:
    """One file of a checkpoint, open for reading until this object is garbage-collected.

    Args:
        path: Its name, for messages.
        descriptor: An open descriptor, which this object closes.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._direct = _open_direct(descriptor)
        self._map: MappedFile | None = None
        self._lock = threading.Lock()
        for opened in {self._descriptor, self._direct}:
            weakref.finalize(self, os.close, opened).atexit = False

    @property
    def can_bypass(self) -> bool:
        """Whether the file supports reads that bypass the page cache."""
        return self._direct != self._descriptor

    def size(self) -> int:
        """Return the present size of the file in bytes."""
        # Called before every use of a mapped block; fstat would take several times as long.
        return os.lseek(self._descriptor, 0, os.SEEK_END)

    def read(self, memory: memoryview, offset: int, needed: int, bypass: bool = False) -> None:
        """Fill `memory` with the file's bytes from `offset` on.

        Args:
            memory: Target. With `bypass` its address, its length and `offset` must be multiples of `FILE_ALIGNMENT`.
            offset: Offset in the file in bytes.
            needed: Bytes that the file must provide; the rest of `memory` may lie beyond the end of the file.
            bypass: Read directly from disk, without the page cache.

        Raises:
            CheckpointFormatError: The file ends too early.
            OSError: The disk cannot be read; names the file.
        """
        done = 0
        while done < needed:
            aligned = bypass and self.can_bypass and done % FILE_ALIGNMENT == 0
            try:
                count = os.preadv(self._direct if aligned else self._descriptor, [memory[done:]], offset + done)
            except OSError as error:
                if aligned and error.errno == errno.EINVAL:  # the file system accepts O_DIRECT on open only
                    bypass = False
                    continue
                raise OSError(error.errno, f"weights cannot be read ({error.strerror})", str(self.path)) from error
            if count == 0:
                raise self._cut_short(offset + done, offset + needed)
            done += count

    def view_cached(self, offset: int, needed: int) -> torch.Tensor | None:
        """Read bytes of the file into the page cache and return a view of them there: uint8, read-only.

        The view belongs to a private map that nobody writes to, so `release` cannot lose data. Callers must call
        `check_length` before they access it.

        Args:
            offset: Offset in the file in bytes.
            needed: Bytes that the file must provide; the view extends to the end of the last page.

        Returns:
            None if the file cannot be mapped, is truncated, or the disk fails; `read` raises the reason.
        """
        end = offset + needed
        try:
            whole = self._whole()
            if end > min(whole.nbytes, self.size()):
                return None
            view = whole.tensor(torch.uint8, (min(end + -end % FILE_ALIGNMENT, whole.nbytes) - offset,), offset)
            populate([view])
        except (CheckpointError, OSError):
            return None
        return view

    def evict(self, offset: int, nbytes: int) -> None:
        """Have the kernel evict bytes of the file from the page cache. Pages that a process has mapped stay, and so do
        those at the ends of the range that other bytes share."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def check_length(self, end: int) -> None:
        """Raise CheckpointFormatError if the file ends before byte `end`: accessing a map beyond the end of its file
        would terminate the process."""
        size = self.size()
        if size < end:
            raise self._cut_short(size, end)

    def _whole(self) -> MappedFile:
        with self._lock:
            if self._map is None:
                # Through /proc, as in `_open_direct`.
                self._map = MappedFile(Path(f"/proc/self/fd/{self._descriptor}"), track=False)
            return self._map

    def _cut_short(self, end: int, wanted: int) -> CheckpointFormatError:
        return CheckpointFormatError(
            f"{self.path}: ends at byte {end}, but weights up to byte {wanted} are wanted: "
            "it was cut short while in use; copy or download it again"
        )


class SourceFiles:
    """The open files of one streamer, each opened on first use."""

    def __init__(self) -> None:
        self._files: dict[tuple[Path, int, int], SourceFile] = {}

    def get(self, region: MappedRegion) -> SourceFile | None:
        """Return the file of `region`; None if it was removed or replaced."""
        key = (region.path, region.device, region.inode)
        if key not in self._files:
            descriptor = region.open()
            if descriptor is None:
                return None
            self._files[key] = SourceFile(region.path, descriptor)
        return self._files[key]


def _open_direct(descriptor: int) -> int:
    """Return a second descriptor of the file that bypasses the page cache; `descriptor` itself if that fails."""
    if not _DIRECT:
        return descriptor
    try:
        # Through /proc, which opens the same file even if another has its name now.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | _DIRECT | os.O_CLOEXEC)
    except OSError:
        return descriptor
