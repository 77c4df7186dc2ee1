"""How a block's bytes get from where they lie to a device slab."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checkpoint import mapped_region
from ..devices import CopyStream, Event
from .block import Block
from .stats import StreamStats


class Fetcher:
    """Fetches blocks to one device over its copy stream, and counts the bytes by where they came from."""

    def __init__(self, stream: CopyStream, device: torch.device, stats: StreamStats) -> None:
        self._stream = stream
        self._device = device
        self._stats = stats

    def fetch(self, block: Block, slab: torch.Tensor, after: Sequence[Event]) -> Event:
        """Start bringing `block` into `slab` once the events `after` are done; return the event of its arrival."""
        self._stats.fetches += 1
        for tensor in block.tensors:
            if mapped_region(tensor.value) is None:
                self._stats.bytes_from_ram += tensor.value.nbytes
            else:
                self._stats.bytes_from_disk += tensor.value.nbytes
        return self._stream.submit(lambda: block.fetch(slab), after)
