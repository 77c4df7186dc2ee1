"""Fetches of blocks to a device, from host memory or from disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ...devices import CopyStream, Event
from ...devices.pinned import copies_from_pinned
from ...devices.streams import TimedCopyStream
from ...limits import READERS, STAGING_BYTES
from ...plan import staging_memory
from ..weights.block import Block
from ..weights.quantized_block import QuantizedBlock
from ..weights.visits import StreamStats
from .disk_reader import DiskReader
from .page_cache import ReadPolicy
from .quantized_transfer import QuantizedTransfers, Transfer


class Fetcher:
    """Fetches blocks to one device: from host memory over its link, from disk through staging memory.

    Args:
        stream: The copy stream of the device.
        device: Target device.
        stats: Counters of bytes and seconds.
        blocks: The blocks that are fetched repeatedly; their bytes on disk decide whether reads use the page cache.
        staging_bytes: Limit of the staging memory on the host.
        readers: Number of reader threads.
        parts: Bytes of each part on disk that is fetched by itself, as experts are; None: whole blocks are.
    """

    def __init__(
        self,
        stream: CopyStream,
        device: torch.device,
        stats: StreamStats,
        blocks: Sequence[Block] = (),
        staging_bytes: int = STAGING_BYTES,
        readers: int = READERS,
        parts: Sequence[int] | None = None,
    ) -> None:
        self._is_pinning = copies_from_pinned(device)
        self._stats = stats
        self._link = TimedCopyStream(stream, device, stats.add_link_seconds)
        self._on_disk = [block.nbytes for block in map(_carried, blocks) if block.on_disk]
        self._parts = self._on_disk if parts is None else parts
        self._reading = staging_bytes, readers
        self._disk: DiskReader | None = None
        quantized = [block for block in blocks if isinstance(block, QuantizedBlock)]
        self._quantized = QuantizedTransfers(device, quantized)
        self.uses(self._quantized.memory)

    @property
    def reads_files(self) -> bool:
        """Whether any of the blocks is on disk."""
        return bool(self._on_disk)

    @property
    def staging_bytes(self) -> int:
        """Bytes of device memory of the staging buffers for quantised blocks."""
        return self._quantized.nbytes

    def uses(self, memory: torch.Tensor) -> None:
        """Tell the device's allocator that fetches into `memory` may be under way when it is freed."""
        self._link.uses(memory)
        self._quantized.stream.uses(memory)

    def expect(self, blocks: Sequence[Block]) -> None:
        """Announce the blocks that will be fetched next; those on disk are read ahead."""
        self._reader().expect([block for block in map(_carried, blocks) if block.on_disk])

    def fetch(self, block: Block, memory: torch.Tensor, after: Sequence[Event]) -> Event:
        """Start fetching `block` into `memory` after the events `after`; return the event of its arrival.

        Errors are stored and re-raised in the waiter of that event: CheckpointFormatError for a truncated file, OSError
        for one that cannot be read.
        """
        transfer = self._quantized.start(block, memory) if isinstance(block, QuantizedBlock) else None
        if block.on_disk or self._holds_host(block) or (self._disk is not None and self._disk.is_busy):
            # Queued behind running reads, so that an older fetch never overwrites a newer one.
            self._stats.add_fetch()
            return self._reader().fetch(transfer or Transfer(block, memory), after)
        if transfer is not None:
            self._stats.add_fetch(transfer.block.nbytes)
            return transfer.run(self._link, after)
        self._stats.add_fetch(block.nbytes)
        return self._link.submit(partial(block.fetch, memory), after, block.nbytes)

    def _holds_host(self, block: Block) -> bool:
        """Whether the copy of a block holds the thread that submits it: from memory that is not pinned.

        The reader's thread then submits it, so that the forward goes on to launch its compute.
        """
        return self._is_pinning and not _carried(block).is_pinned

    def _reader(self) -> DiskReader:
        if self._disk is None:
            staging_bytes, readers = self._reading
            policy = ReadPolicy(sum(self._on_disk))
            staging = staging_memory(self._parts, staging_bytes, readers)
            self._disk = DiskReader(self._link, policy, self._stats, staging, self._is_pinning, readers)
        return self._disk


def _carried(block: Block) -> Block:
    """Return the block whose bytes are copied for `block`: its carrier if it is quantised."""
    return block.carrier if isinstance(block, QuantizedBlock) else block
