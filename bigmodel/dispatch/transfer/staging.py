"""Staging memory: host memory in which chunks of files wait for the link to a device.

A slot stages a chunk in one of two ways: it reads it into the slot's own memory, which may be pinned for a GPU; or it
views the chunk in the page cache, which saves a CPU copy on devices that copy from any memory at the same speed.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from ...checkpoint import release
from ...devices import HOST, Event
from ...devices.pinned import empty_host
from ...limits import FILE_ALIGNMENT
from ...plan import StagingMemory
from .page_cache import ReadMode, seems_cached
from .read_plan import Chunk

VIEW_BYTES = 2**20
"""Chunks of at least so many bytes are viewed in the page cache: mapping a smaller one takes longer than copying it."""


class StagingSlot:
    """Staging for one chunk.

    Args:
        memory: Memory shared by all slots.
        number: Index of this slot's part of it.

    Attributes:
        drained: The event of the copy that must finish before the slot is filled again.
    """

    def __init__(self, memory: StagedBytes, number: int) -> None:
        self.drained: Event | None = None
        self._memory = memory
        self._number = number
        self._own: torch.Tensor | None = None
        self._buffer = memoryview(b"")  # of the slot's own memory; making it gives up the interpreter's lock
        self._view: torch.Tensor | None = None
        self._chunk: Chunk | None = None
        self._mode = ReadMode.KEEP

    def fill(self, chunk: Chunk, mode: ReadMode) -> torch.Tensor:
        """Stage a chunk and return its bytes. The slot must be empty (see `empty`).

        Args:
            chunk: The chunk to stage.
            mode: How the page cache is used.

        Raises:
            CheckpointFormatError: The file is truncated.
            OSError: The disk cannot be read.
        """
        if mode is not ReadMode.DIRECT and not self._memory.pin and chunk.needed >= VIEW_BYTES:
            self._view, self._chunk = chunk.file.view_cached(chunk.offset, chunk.needed), chunk
            self._mode = mode
            if self._view is not None:
                return self._view
        if self._own is None:
            self._own = self._memory.part(self._number)
            self._buffer = memoryview(self._own.numpy())  # type: ignore[arg-type]
        chunk.file.read(self._buffer[: chunk.nbytes], chunk.offset, chunk.needed, mode is ReadMode.DIRECT)
        if mode is ReadMode.PASS:
            chunk.file.evict(chunk.offset, chunk.nbytes)
        return self._own

    def empty(self) -> None:
        """Wait until the staged chunk is drained, and release it."""
        if self.drained is not None:
            self.drained.synchronize()
        if self._view is not None:
            release(self._view)
            if self._mode is ReadMode.PASS and self._chunk is not None:
                self._chunk.file.evict(self._chunk.offset, self._chunk.nbytes)
            self._view = None

    @property
    def is_lost(self) -> bool:
        """Whether the viewed chunk was evicted from the page cache: copying it would read it page by page."""
        return self._view is not None and not seems_cached(self._view.data_ptr(), self._view.nbytes)

    def check(self) -> None:
        """Raise CheckpointFormatError if the file of the viewed chunk was truncated."""
        if self._view is not None and self._chunk is not None:
            self._chunk.file.check_length(self._chunk.offset + self._chunk.needed)


class StagingSlots:
    """All slots of one reader.

    Args:
        planned: Number and bytes of the slots; these are a multiple of `FILE_ALIGNMENT`.
        pin: Read chunks into pinned memory, instead of viewing them in the page cache.

    Attributes:
        free: Slots that can be filled once they are drained, in the order of their release.
    """

    def __init__(self, planned: StagingMemory, pin: bool) -> None:
        memory = StagedBytes(planned, pin)
        self.free = deque(StagingSlot(memory, number) for number in range(planned.chunks))


class StagedBytes:
    """Memory of all slots, allocated on first use and aligned for reads that bypass the page cache.

    Pinned memory is allocated for each slot: it is rounded up to a power of two, which a planned chunk is.
    """

    def __init__(self, planned: StagingMemory, pin: bool) -> None:
        self.pin = pin
        self._chunk_bytes = planned.chunk_bytes
        self._nbytes = planned.nbytes
        self._lock = threading.Lock()
        self._whole: torch.Tensor | None = None
        self._pinned: dict[int, torch.Tensor] = {}

    def part(self, number: int) -> torch.Tensor:
        with self._lock:
            if self.pin:
                if number not in self._pinned:
                    self._pinned[number] = empty_host(self._chunk_bytes, pin=True)
                return self._pinned[number]
            if self._whole is None:
                self._whole = self._allocate()
        return self._whole[number * self._chunk_bytes : (number + 1) * self._chunk_bytes]

    def _allocate(self) -> torch.Tensor:
        memory = torch.empty(self._nbytes + FILE_ALIGNMENT, dtype=torch.uint8, device=HOST)
        return memory[-memory.data_ptr() % FILE_ALIGNMENT :]
