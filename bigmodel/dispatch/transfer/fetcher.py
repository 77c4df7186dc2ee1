"""How a block's bytes get from where they lie to a device slab."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ...devices import CopyStream, Event
from ...plan import staging
from ..weights.block import Block
from ..weights.quantized_block import QuantizedBlock
from ..weights.stats import StreamStats
from .copy_link import Link
from .disk_reader import DiskReader
from .page_cache import ReadPolicy
from .quantized_transfer import Arrival, Staging
from .staging import chunk_of


class Fetcher:
    """Fetches blocks to one device: from memory straight over its link, from disk by way of staging memory.

    Args:
        stream: The copy stream of the device.
        device: Where blocks go.
        stats: Where bytes and seconds are counted.
        blocks: The blocks that are fetched again and again; how many bytes of them lie on disk decides whether the
            page cache is worth filling.
    """

    def __init__(
        self, stream: CopyStream, device: torch.device, stats: StreamStats, blocks: Sequence[Block] = ()
    ) -> None:
        self._stats = stats
        self._link = Link(stream, device, stats)
        fetched = [block.carrier if isinstance(block, QuantizedBlock) else block for block in blocks]
        on_disk = [block.nbytes for block in fetched if block.on_disk]
        chunk_bytes = chunk_of(staging(on_disk))
        self.reads_files = bool(on_disk)
        """Whether any of the blocks lies on disk."""
        self._disk = DiskReader(self._link, ReadPolicy(sum(on_disk)), stats, device.type == "cuda", chunk_bytes)
        self._staging = Staging(device, [block for block in blocks if isinstance(block, QuantizedBlock)])

    @property
    def staging_bytes(self) -> int:
        """Bytes of device memory in which quantised blocks arrive."""
        return self._staging.nbytes

    def expect(self, blocks: Sequence[Block]) -> None:
        """Say which blocks will be fetched next, as soon as there is room: what lies on disk is read ahead."""
        carried = [block.carrier if isinstance(block, QuantizedBlock) else block for block in blocks]
        self._disk.expect([block for block in carried if block.on_disk])

    def fetch(self, block: Block, slab: torch.Tensor, after: Sequence[Event]) -> Event:
        """Start bringing `block` into `slab` once the events `after` are done; return the event of its arrival.

        Waiting for that event raises what went wrong: CheckpointFormatError for a file that was cut short, OSError
        for one that cannot be read.
        """
        arrival = self._staging.arrival(block, slab) if isinstance(block, QuantizedBlock) else None
        if block.on_disk or self._disk.is_busy:
            # Behind reads that are under way, so that a slab is never written by an older fetch after a newer one.
            self._stats.add(fetches=1)
            return self._disk.fetch(arrival or Arrival(block, slab), after)
        if arrival is not None:
            self._stats.add(fetches=1, from_ram=arrival.block.nbytes)
            return arrival.bring(self._link, after)
        self._stats.add(fetches=1, from_ram=block.nbytes)
        return self._link.copy(partial(block.fetch, slab), after, block.nbytes)
