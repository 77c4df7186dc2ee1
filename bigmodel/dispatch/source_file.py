"""Files that weights are read from: opened once, shared by all blocks, read past the page cache where that pays."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from pathlib import Path

from ..checkpoint import MappedRegion
from ..devices import HOST, free_memory_bytes
from ..errors import CheckpointFormatError

ALIGNMENT = 4096
"""What offset, length and memory of a read past the page cache must be multiples of, on every common disk."""

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
            memory: Where they go. For `bypass` its address, its length and `offset` are multiples of `ALIGNMENT`.
            offset: The first byte, counted from the beginning of the file.
            needed: How many bytes must be there; the rest of `memory` may lie beyond the end of the file.
            bypass: Read from the disk itself, leaving the page cache as it is.

        Raises:
            CheckpointFormatError: The file ends too early.
            OSError: The disk cannot be read; names the file.
        """
        done = 0
        while done < needed:
            aligned = bypass and self.can_bypass and done % ALIGNMENT == 0
            try:
                count = os.preadv(self._direct if aligned else self._descriptor, [memory[done:]], offset + done)
            except OSError as error:
                if aligned and error.errno == errno.EINVAL:  # the file system promised more than it does
                    bypass = False
                    continue
                raise OSError(error.errno, f"weights cannot be read ({error.strerror})", str(self.path)) from error
            if count == 0:
                raise CheckpointFormatError(
                    f"{self.path}: ends at byte {offset + done}, but weights up to byte {offset + needed} are wanted: "
                    "it was cut short while in use; copy or download it again"
                )
            done += count


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


class ReadPolicy:
    """Decides for each read whether it goes past the page cache.

    Bytes that are in the cache are read from there. Others are read through it if everything that will be read fits
    into memory, for then the next pass finds it there. If not, the cache would have thrown them out again by then (a
    cycle longer than an LRU cache never hits), and whichever way the disk has proved faster is taken.

    Args:
        nbytes: How many bytes are read again and again.
    """

    RETRY = 32
    """Every so many cold reads the way that is not preferred is tried again."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._pace = {True: 0.0, False: 0.0}
        self._cold = 0
        self._fits = True
        self._asked = float("-inf")

    def bypasses(self, cached: bool) -> bool:
        """Whether the next read should go past the cache, which holds its bytes or does not (`cached`)."""
        if cached or self._all_fits():
            return False
        with self._lock:
            self._cold += 1
            direct, buffered = self._pace[True], self._pace[False]
            preferred = not buffered or direct >= buffered
            return preferred if self._cold % self.RETRY else not preferred

    def record(self, bypassed: bool, nbytes: int, seconds: float) -> None:
        """Take note of how long a cold read of `nbytes` took."""
        pace = nbytes / max(seconds, 1e-9)
        with self._lock:
            known = self._pace[bypassed]
            self._pace[bypassed] = pace if not known else 0.8 * known + 0.2 * pace

    def _all_fits(self) -> bool:
        now = time.monotonic()
        if now - self._asked > 1.0:
            self._asked = now
            self._fits = self.nbytes < 0.8 * free_memory_bytes(HOST)
        return self._fits


def _open_direct(descriptor: int) -> int:
    """Return a second descriptor of the same file that bypasses the page cache, or the same one where there is none."""
    if not _DIRECT:
        return descriptor
    try:
        # By way of /proc, so that it is the same file even if another has taken its name meanwhile.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | _DIRECT | os.O_CLOEXEC)
    except OSError:
        return descriptor
