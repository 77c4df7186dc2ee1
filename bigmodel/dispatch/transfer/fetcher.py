"""How a block's bytes get from where they lie to device memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ...devices import CopyStream, Event
from ...devices.streams import TimedCopyStream
from ...limits import READERS, STAGING_BYTES
from ...plan import staging
from ..weights.block import Block
from ..weights.quantized_block import QuantizedBlock
from ..weights.stats import StreamStats
from .disk_reader import DiskReader
from .page_cache import ReadPolicy
from .quantized_transfer import QuantizedTransfers, Transfer
from .staging import chunk_of


class Fetcher:
    """Fetches blocks to one device: from host memory straight over its link, from disk by way of staging memory.

    Args:
        stream: The copy stream of the device.
        device: Where blocks go.
        stats: Where bytes and seconds are counted.
        blocks: The blocks that are fetched again and again; how many bytes of them lie on disk decides whether the
            page cache is worth filling.
        staging_bytes: Host memory through which blocks on disk pass, at most.
        readers: How many threads read them.
    """

    def __init__(
        self,
        stream: CopyStream,
        device: torch.device,
        stats: StreamStats,
        blocks: Sequence[Block] = (),
        staging_bytes: int = STAGING_BYTES,
        readers: int = READERS,
    ) -> None:
        self._device = device
        self._stats = stats
        self._link = TimedCopyStream(stream, device, lambda seconds: stats.add(on_link=seconds))
        self._on_disk = [block.nbytes for block in map(_carried, blocks) if block.on_disk]
        self._reading = staging_bytes, readers
        self._disk: DiskReader | None = None
        quantized = [block for block in blocks if isinstance(block, QuantizedBlock)]
        self._quantized = QuantizedTransfers(device, quantized)

    @property
    def reads_files(self) -> bool:
        """Whether any of the blocks lies on disk."""
        return bool(self._on_disk)

    @property
    def staging_bytes(self) -> int:
        """Bytes of device memory in which quantised blocks arrive."""
        return self._quantized.nbytes

    def expect(self, blocks: Sequence[Block]) -> None:
        """Say which blocks will be fetched next, as soon as there is room: what lies on disk is read ahead."""
        self._reader().expect([block for block in map(_carried, blocks) if block.on_disk])

    def fetch(self, block: Block, memory: torch.Tensor, after: Sequence[Event]) -> Event:
        """Start bringing `block` into `memory` once the events `after` are done; return the event of its arrival.

        Waiting for that event raises what went wrong: CheckpointFormatError for a file that was cut short, OSError
        for one that cannot be read.
        """
        transfer = self._quantized.start(block, memory) if isinstance(block, QuantizedBlock) else None
        if block.on_disk or (self._disk is not None and self._disk.is_busy):
            # Behind reads that are under way, so that memory is never written by an older fetch after a newer one.
            self._stats.add(fetches=1)
            return self._reader().fetch(transfer or Transfer(block, memory), after)
        if transfer is not None:
            self._stats.add(fetches=1, from_ram=transfer.block.nbytes)
            return transfer.run(self._link, after)
        self._stats.add(fetches=1, from_ram=block.nbytes)
        return self._link.submit(partial(block.fetch, memory), after, block.nbytes)

    def _reader(self) -> DiskReader:
        if self._disk is None:
            staging_bytes, readers = self._reading
            policy, chunk_bytes = ReadPolicy(sum(self._on_disk)), chunk_of(staging(self._on_disk, staging_bytes))
            pin = self._device.type == "cuda"
            self._disk = DiskReader(self._link, policy, self._stats, pin, chunk_bytes, readers)
        return self._disk


def _carried(block: Block) -> Block:
    """Return the block whose bytes are copied for `block`."""
    return block.carrier if isinstance(block, QuantizedBlock) else block
