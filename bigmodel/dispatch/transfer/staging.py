"""Where chunks of files wait on the host for the link to a device.

A slot holds one chunk in one of two ways. It is read into memory of the slot's own, which a GPU copies from at full
speed if it is pinned. Or it is shown where the page cache has it: a device that copies from all memory alike is spared
a copy by the processor, which is what such copies and the model's own computing compete for.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from ...checkpoint import release
from ...devices import HOST, Event
from ...limits import FILE_ALIGNMENT, STAGING_BYTES
from .page_cache import is_cached
from .read_plan import CHUNK_BYTES, Chunk

SLOTS = STAGING_BYTES // CHUNK_BYTES
"""Slots: those being filled, those full, and those being drained."""

MIN_CHUNK_BYTES = 64 * 2**10
"""Bytes of one read for a model so small that its blocks are hardly larger."""

SHOWN_BYTES = 2**20
"""From this size on a chunk is shown in place: the kernel takes longer to put up a smaller one than to copy it."""


def chunk_of(staging_bytes: int) -> int:
    """Return the bytes of one read, such that all slots together take so many, if that is not too few.

    It is a page or two more, so that a block that does not begin with a page takes no read of its own for its end.
    """
    share = staging_bytes // SLOTS
    return min(max(share + -share % FILE_ALIGNMENT + FILE_ALIGNMENT, MIN_CHUNK_BYTES), CHUNK_BYTES)


class StagingSlot:
    """Room for one chunk on its way.

    Args:
        memory: What it shares with others.
        number: Which part of it is its own.

    Attributes:
        drained: The copy that must end before it is filled again.
    """

    def __init__(self, memory: _Memory, number: int) -> None:
        self.drained: Event | None = None
        self._memory = memory
        self._number = number
        self._shown: torch.Tensor | None = None
        self._chunk: Chunk | None = None

    def fill(self, chunk: Chunk, bypass: bool) -> torch.Tensor:
        """Stage a chunk, once what was staged before is drained; return its bytes.

        Args:
            chunk: What to stage.
            bypass: Read it past the page cache.

        Raises:
            CheckpointFormatError: The file ends too early.
            OSError: The disk cannot be read.
        """
        if not bypass and not self._memory.pin and chunk.needed >= SHOWN_BYTES:
            self._shown, self._chunk = chunk.file.show(chunk.offset, chunk.needed), chunk
            if self._shown is not None:
                return self._shown
        staged = self._memory.part(self._number)
        window = memoryview(staged.numpy())  # type: ignore[arg-type]
        chunk.file.read(window[: chunk.nbytes], chunk.offset, chunk.needed, bypass)
        return staged

    def empty(self) -> None:
        """Wait until what is staged is drained, and let go of it."""
        if self.drained is not None:
            self.drained.synchronize()
        if self._shown is not None:
            release(self._shown)
            self._shown = None

    @property
    def is_lost(self) -> bool:
        """Whether what is shown has left the page cache: copying it would read it page by page."""
        return self._shown is not None and not is_cached(self._shown.data_ptr(), self._shown.nbytes)

    def check(self) -> None:
        """Raise CheckpointFormatError if what is shown is not there any more, its file having been cut short."""
        if self._shown is not None and self._chunk is not None:
            self._chunk.file.check_length(self._chunk.offset + self._chunk.needed)


class StagingSlots:
    """All slots of one reader.

    Args:
        chunk_bytes: Bytes of a chunk; a multiple of `FILE_ALIGNMENT`.
        pin: Read chunks into pinned memory, rather than show them in place.

    Attributes:
        free: Those that can be filled, once they are drained: the one that was given back first comes first.
    """

    def __init__(self, chunk_bytes: int, pin: bool) -> None:
        memory = _Memory(SLOTS, chunk_bytes, pin)
        self.free = deque(StagingSlot(memory, number) for number in range(SLOTS))


class _Memory:
    """Memory of all slots, taken when the first chunk is read into it; aligned as reads past the page cache need it."""

    def __init__(self, parts: int, chunk_bytes: int, pin: bool) -> None:
        self.pin = pin
        self._parts = parts
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._whole: torch.Tensor | None = None

    def part(self, number: int) -> torch.Tensor:
        with self._lock:
            if self._whole is None:
                self._whole = self._taken()
        return self._whole[number * self._chunk_bytes : (number + 1) * self._chunk_bytes]

    def _taken(self) -> torch.Tensor:
        nbytes = self._parts * self._chunk_bytes
        if self.pin:
            return torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=True)
        memory = torch.empty(nbytes + FILE_ALIGNMENT, dtype=torch.uint8, device=HOST)
        return memory[-memory.data_ptr() % FILE_ALIGNMENT :]
