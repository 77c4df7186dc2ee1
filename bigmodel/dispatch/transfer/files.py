"""Files that weights are read from: opened once, shared by all blocks, read past the page cache or shown out of it."""

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
    """One file of a checkpoint, open for reading until nobody holds this object any more.

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
        """Whether the file can be read past the page cache."""
        return self._direct != self._descriptor

    def size(self) -> int:
        """Return how many bytes long the file is now."""
        # Asked before every use of a mapped block; a whole fstat would take several times as long.
        return os.lseek(self._descriptor, 0, os.SEEK_END)

    def read(self, memory: memoryview, offset: int, needed: int, bypass: bool = False) -> None:
        """Fill `memory` with the file's bytes from `offset` on.

        Args:
            memory: Where they go. For `bypass` its address, its length and `offset` are multiples of `FILE_ALIGNMENT`.
            offset: The first byte, counted from the beginning of the file.
            needed: How many bytes must be there; the rest of `memory` may lie beyond the end of the file.
            bypass: Read from the disk itself, leaving the page cache as it is.

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
                if aligned and error.errno == errno.EINVAL:  # the file system promised more than it does
                    bypass = False
                    continue
                raise OSError(error.errno, f"weights cannot be read ({error.strerror})", str(self.path)) from error
            if count == 0:
                raise self._cut_short(offset + done, offset + needed)
            done += count

    def show(self, offset: int, needed: int) -> torch.Tensor | None:
        """Bring bytes of the file into the page cache and return them as they lie there: uint8, not to be written to.

        The map that shows them is this object's own: nobody writes to it, so that `release` forgets nothing that is
        not in the file. Whoever touches them asks `check_length` first.

        Args:
            offset: The first byte, counted from the beginning of the file.
            needed: How many bytes must be there; what is returned reaches to the end of the last page.

        Returns:
            None where that cannot be: no such map, a file cut short, a disk that fails. `read` tells why.
        """
        end = offset + needed
        try:
            whole = self._whole()
            if end > min(whole.nbytes, self.size()):
                return None
            shown = whole.tensor(torch.uint8, (min(end + -end % FILE_ALIGNMENT, whole.nbytes) - offset,), offset)
            populate([shown])
        except (CheckpointError, OSError):
            return None
        return shown

    def check_length(self, end: int) -> None:
        """Raise CheckpointFormatError if the file ends before byte `end`: to touch the bytes of a map that are not
        there any more would end the process."""
        size = self.size()
        if size < end:
            raise self._cut_short(size, end)

    def _whole(self) -> MappedFile:
        with self._lock:
            if self._map is None:
                # By way of /proc, for the same reason as in `_open_direct`.
                self._map = MappedFile(Path(f"/proc/self/fd/{self._descriptor}"), track=False)
            return self._map

    def _cut_short(self, end: int, wanted: int) -> CheckpointFormatError:
        return CheckpointFormatError(
            f"{self.path}: ends at byte {end}, but weights up to byte {wanted} are wanted: "
            "it was cut short while in use; copy or download it again"
        )


class SourceFiles:
    """The open files of one streamer, each opened when its first byte is wanted."""

    def __init__(self) -> None:
        self._files: dict[tuple[Path, int, int], SourceFile] = {}

    def get(self, region: MappedRegion) -> SourceFile | None:
        """Return the file of `region`; None if it is not there any more or another has taken its name."""
        key = (region.path, region.device, region.inode)
        if key not in self._files:
            descriptor = region.open()
            if descriptor is None:
                return None
            self._files[key] = SourceFile(region.path, descriptor)
        return self._files[key]


def _open_direct(descriptor: int) -> int:
    """Return a second descriptor of the same file that bypasses the page cache, or the same one where there is none."""
    if not _DIRECT:
        return descriptor
    try:
        # By way of /proc, so that it is the same file even if another has taken its name meanwhile.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | _DIRECT | os.O_CLOEXEC)
    except OSError:
        return descriptor
