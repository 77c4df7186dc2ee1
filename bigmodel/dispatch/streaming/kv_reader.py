"""Reads rows of keys, or of values, of which a file has the older ones, into memory of an accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ...devices import CopyStream, Event
from ...devices.pinned import copies_from_pinned
from ...plan import StagingMemory
from ..transfer.disk_reader import DiskReader
from ..transfer.page_cache import ReadPolicy
from ..transfer.quantized_transfer import Transfer
from ..transfer.read_job import ReadEvent
from ..weights.block import Block, HostTensor
from ..weights.layout import Layout, Place
from ..weights.visits import StreamStats
from .kv_file import reading


class KVReader:
    """A reader of files for one accelerator; what RAM holds of the rows is copied in the same turn.

    Args:
        stream: Copy stream to the accelerator.
        device: The accelerator.
        policy: Decides how reads use the page cache.
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

    def fetch(self, rows: Iterable[tuple[int, torch.Tensor]], memory: torch.Tensor, after: Sequence[Event]) -> Arrival:
        """Start reading `rows` into `memory` after some events; return the event of their arrival.

        Args:
            rows: Rows on the host, each with the byte of `memory` that they begin at; views of a file are read.
            memory: Bytes of the accelerator.
            after: The events.
        """
        placed = list(rows)
        block = Block("keys and values", [HostTensor(each, each.dtype) for _, each in placed])
        places = tuple(Place(at, each.nbytes, each.dtype, each.shape) for at, each in placed)
        block.layout = Layout(places, max(place.offset + place.nbytes for place in places))
        return Arrival(self._reader.fetch(Transfer(block, memory), after))


def one_after_the_other(rows: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield rows with the byte that they begin at without gaps: attention reads them as one tensor."""
    at = 0
    for each in rows:
        yield at, each
        at += each.nbytes


class Arrival:
    """The event of a read, whose errors say that keys and values cannot be read."""

    def __init__(self, event: ReadEvent) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.done()

    def wait(self) -> None:
        with reading():
            self._event.wait()

    def synchronize(self) -> None:
        with reading():
            self._event.synchronize()

    def queued(self) -> None:
        """Block the calling thread until all its copies are queued on the copy stream, or no more will be."""
        self._event.queued()


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
