"""Reads rows of keys, or of values, of which a file has the older ones, into memory of an accelerator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...devices import CopyStream, Event
from ...devices.pinned import copies_from_pinned
from ...plan import StagingMemory
from ..transfer.disk_reader import DiskReader
from ..transfer.page_cache import ReadPolicy
from ..transfer.quantized_transfer import Transfer
from ..weights.block import Block, HostTensor
from ..weights.layout import Layout, Place
from ..weights.visits import StreamStats
from .host_rows import HostRows


class KVReader:
    """A reader of files for one accelerator; what RAM holds of the rows is copied in the same turn.

    Args:
        stream: Copy stream to the accelerator.
        device: The accelerator.
        policy: Decides whether reads bypass the page cache.
        stats: Counters of bytes and seconds.
        staging: Memory through which rows in files pass.
        readers: Number of reader threads.
    """

    def __init__(
        self,
        stream: CopyStream,
        device: torch.device,
        policy: ReadPolicy,
        stats: StreamStats,
        staging: StagingMemory,
        readers: int,
    ) -> None:
        self._reader = DiskReader(stream, policy, stats, staging, copies_from_pinned(device), readers)

    def fetch(self, rows: HostRows, memory: torch.Tensor, after: Sequence[Event]) -> Event:
        """Start reading `rows` into `memory`, uint8, after the events `after`; return the event of their arrival."""
        block = Block("keys and values", [HostTensor(each, each.dtype) for each in rows.spans(0, rows.length)])
        places, at = [], 0
        for tensor in block.tensors:
            value = tensor.value
            places.append(Place(at, value.nbytes, value.dtype, value.shape))
            at += value.nbytes
        block.layout = Layout(tuple(places), at)  # without gaps: attention reads them as one tensor
        return self._reader.fetch(Transfer(block, memory), after)


class AllOf:
    """The event after several others have passed."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def done(self) -> bool:
        return all(event.done() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.wait()

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()
