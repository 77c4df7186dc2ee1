"""Fetches keys and values that lie on the host into slots of one accelerator, ahead of the layers that read them.

    update:  wait until the layer's rows have arrived in a slot; put the call's own behind them, as `DynamicCache` does;
             copy these to the host; start fetching the layers that come next

Rows that are in a file are read on the way (`KVReader`), beside those that RAM holds.

All copies are queued on one copy stream, in order: rows reach the host before they are fetched again, and a slot is
overwritten once its rows were read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ...devices import CopyStream, Event, copy_stream
from ...plan import StagingMemory
from ..weights.visits import StreamStats
from .host_rows import HostRows
from .kv_file import KVDisk
from .kv_reader import AllOf, KVReader, one_after_the_other


class KVLayer(Protocol):
    """One layer of a cache whose keys and values lie on the host."""

    rows: tuple[HostRows, HostRows]
    version: int
    """Changes whenever rows that were there are others."""
    written: Event | None
    """The last copy of rows to the host, by whichever accelerator."""

    def following(self, count: int) -> Sequence[KVLayer]:
        """Return the layers of the same cache that are read next on the same accelerator, at most `count`."""
        ...


class OlderRows(NamedTuple):
    """Where older rows are, and what reads them.

    Attributes:
        disk: Files of them.
        in_ram: Rows of each layer that RAM holds at most.
        staging: Memory of each accelerator through which they are read, by device.
        readers: Number of threads that read for one accelerator.
    """

    disk: KVDisk
    in_ram: int
    staging: dict[torch.device, StagingMemory]
    readers: int


class _Slot:
    """Memory of the accelerator for the keys and the values of one layer, and the rows in it."""

    def __init__(self) -> None:
        self.memory: list[torch.Tensor | None] = [None, None]
        self.of: weakref.ref[KVLayer] | None = None  # its rows are given back with the cache, whatever a slot has
        self.version = self.length = self.last_use = 0
        self.arrived: Event | None = None
        self.copied: Event | None = None  # the last copy from it or to it
        self.is_read = False  # that copy is of a reader, which submits it some time later

    def is_of(self, layer: KVLayer) -> bool:
        """Whether its rows are, or were, those of `layer`."""
        return self.of is not None and self.of() is layer

    def take(self, layer: KVLayer) -> None:
        """Note that the rows of `layer` are in it, as these are at present."""
        self.of, self.version, self.length = weakref.ref(layer), layer.version, layer.rows[0].length

    def holds(self, layer: KVLayer) -> bool:
        """Whether the present rows of `layer` are in it, or on their way."""
        return self.is_of(layer) and (self.version, self.length) == (layer.version, layer.rows[0].length)


class KVFetcher:
    """The slots of one accelerator for keys and values on the host. Threads may share it.

    Args:
        device: The accelerator.
        slots: Number of slots.
        planned: Rows times sequences that the plan has counted for a layer: slots have memory for as many at once, and
            are made larger only for more.
        older: Where older rows are on disk; None: they are not.
    """

    def __init__(self, device: torch.device, slots: int, planned: int, older: OlderRows | None = None) -> None:
        self._device = device
        self._planned = planned
        self._slots = [_Slot() for _ in range(max(slots, 1))]
        self._lock = threading.RLock()
        self._clock = 0
        self._stream: CopyStream = copy_stream(device)
        self.stats = StreamStats()
        self._reader: KVReader | None = None
        if older is not None:
            staging = older.staging[device]
            self._reader = KVReader(self._stream, device, older.disk.policy, self.stats, staging, older.readers)

    def update(self, layer: KVLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values of `layer` on the accelerator, and add the new ones to those on the host.

        Args:
            layer: The layer.
            key: New keys [sequences, heads, tokens, dim], on the accelerator.
            value: New values, likewise.
        """
        with self._lock:
            slot = self._slot_of(layer)
            before = layer.rows[0].length
            found = []
            memory = [self._room(slot, which, each, before) for which, each in enumerate((key, value))]
            for which, new in enumerate((key, value)):
                past = memory[which][:before].permute(1, 2, 0, 3) if before else new.new_empty(0)
                found.append(torch.cat([past, new], dim=-2))
            with torch.inference_mode(False), torch.no_grad():
                self._write_back(layer, slot, memory, (key, value), before)
                self._prefetch(layer)
            return found[0], found[1]

    def _slot_of(self, layer: KVLayer) -> _Slot:
        """Return a slot with the rows of `layer`, which all later compute waits for."""
        slot = next((each for each in self._slots if each.holds(layer)), None)
        if slot is None:
            self.stats.misses += 1
            slot = min(self._slots, key=lambda each: each.last_use)
            with torch.inference_mode(False), torch.no_grad():
                self._fetch(layer, slot)
        else:
            self.stats.hits += 1
        if slot.arrived is not None:
            arrived, slot.arrived = slot.arrived, None
            try:
                arrived.wait()
            except BaseException:
                slot.of = None
                raise
        self._clock += 1
        slot.last_use = self._clock
        return slot

    def _room(self, slot: _Slot, which: int, new: torch.Tensor, before: int) -> torch.Tensor:
        """Return a slot's keys or values as [rows, sequences, heads, dim], with those of `new` at the end."""
        sequences, heads, tokens, dim = new.shape
        row = sequences * heads * dim * new.element_size()
        with torch.inference_mode(False), torch.no_grad():
            held = slot.memory[which]
            memory = self._at_least(slot, which, (before + tokens) * row, self._planned * row // sequences)
            if held is not None and memory is not held and before:
                memory[: before * row].copy_(held[: before * row])
            rows = memory[: (before + tokens) * row]
            return rows.view(new.dtype).view(before + tokens, sequences, heads, dim)

    def _at_least(self, slot: _Slot, which: int, nbytes: int, planned: int) -> torch.Tensor:
        memory = slot.memory[which]
        if memory is None or memory.nbytes < nbytes:
            size = planned if nbytes <= planned else nbytes + nbytes // 4
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._stream.uses(memory)
            slot.memory[which] = memory
        return memory

    def _write_back(
        self,
        layer: KVLayer,
        slot: _Slot,
        memory: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        before: int,
    ) -> None:
        """Put the new rows into the slot, in the order that the host has them in, and copy them to the host."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def settle() -> None:
            self._queue(copies[:]).synchronize()
            copies.clear()
            if layer.written is not None:
                layer.written.synchronize()

        for rows, whole, values in zip(layer.rows, memory, new, strict=True):
            whole[before:].copy_(values.detach().permute(2, 0, 1, 3))
            at = before
            for target in rows.grow(values, settle):
                copies.append((target, whole[at : at + len(target)]))
                at += len(target)
        slot.take(layer)
        slot.copied = layer.written = self._queue(copies)
        slot.is_read = False

    def _prefetch(self, layer: KVLayer) -> None:
        """Start fetching the layers that are read next, into slots of others."""
        wanted = layer.following(len(self._slots))
        for successor in wanted:
            if not successor.rows[0].length or any(slot.holds(successor) for slot in self._slots):
                continue
            free = [slot for slot in self._slots if not any(map(slot.is_of, wanted))]
            if not free:
                free = [slot for slot in self._slots if slot.is_of(successor)]
            if not free:
                return
            self._fetch(successor, min(free, key=lambda slot: slot.last_use))

    def _fetch(self, layer: KVLayer, slot: _Slot) -> None:
        """Start fetching the rows of `layer` into `slot`."""
        slot.take(layer)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        arriving: list[Event] = []
        written = [] if layer.written is None else [layer.written]  # perhaps by the stream of another accelerator
        for which, rows in enumerate(layer.rows):
            nbytes, at = rows.length * rows.row_bytes, 0
            if not nbytes:
                continue
            planned = self._planned * rows.row_bytes // rows.sequences
            memory = self._at_least(slot, which, nbytes, planned)
            if rows.on_disk and self._reader is not None:
                placed = one_after_the_other(rows.spans(0, rows.length))
                arriving.append(self._reader.fetch(placed, memory, [self._stream.compute_mark(), *written]))
                continue
            for source in rows.spans(0, rows.length):
                target = memory[at : at + source.nbytes].view(source.dtype).view(source.shape)
                copies.append((target, source))
                at += source.nbytes
        is_read = bool(arriving)
        if copies:
            before = [slot.copied] if slot.is_read and slot.copied is not None else []
            arriving.append(self._queue(copies, [*before, *written]))
        if arriving:
            slot.copied, slot.is_read = AllOf(arriving), is_read
        slot.arrived = slot.copied
        self.stats.add_fetch(sum(source.nbytes for _, source in copies))

    def _queue(self, copies: list[tuple[torch.Tensor, torch.Tensor]], before: Sequence[Event] = ()) -> Event:
        """Queue copies (target, source) behind the compute that was launched so far, and behind other events."""

        def work() -> None:
            with torch.inference_mode(False), torch.no_grad():
                for target, source in copies:
                    target.copy_(source, non_blocking=True)

        after = [self._stream.compute_mark(), *before]
        return self._stream.submit(work, after, sum(source.nbytes for _, source in copies))

    def synchronize(self) -> None:
        """Block the calling thread until all rows are on the host."""
        self._queue([]).synchronize()


class KVFetchers:
    """What all caches of one dispatched model share: a fetcher of each accelerator, and memory of the host.

    Args:
        slots: As for `KVFetcher`.
        planned_rows: Tokens of a sequence that the plan counts.
        planned_sequences: Sequences that it counts.
        allocate: Returns host memory of a number of bytes.
        older: Where older rows are on disk; None: RAM holds all.

    Attributes:
        layers: Layers of a cache whose keys and values lie on the host.
        others: Counters of what keeps such keys and values itself, as an engine does.
        pages_in_ram: Returns the bytes that this has in RAM.
    """

    def __init__(
        self,
        slots: int,
        planned_rows: int,
        planned_sequences: int,
        allocate: Callable[[int], torch.Tensor],
        older: OlderRows | None = None,
    ) -> None:
        self.slots = slots
        self.allocate = allocate
        self.layers: set[int] = set()
        self.others: list[StreamStats] = []
        self.pages_in_ram: Callable[[], int] = lambda: 0
        self.older = older
        self._rows: weakref.WeakSet[HostRows] = weakref.WeakSet()
        self._planned = planned_rows, planned_sequences
        self._lock = threading.Lock()
        self.fetchers: dict[torch.device, KVFetcher] = {}

    def of(self, device: torch.device) -> KVFetcher:
        """Return the fetcher of an accelerator."""
        with self._lock:
            if device not in self.fetchers:
                rows, sequences = self._planned
                self.fetchers[device] = KVFetcher(device, self.slots, rows * sequences, self.older)
            return self.fetchers[device]

    def new_rows(self) -> HostRows:
        """Return rows without any yet."""
        if self.older is None:
            made = HostRows(self.allocate, self._planned[0])
        else:
            made = HostRows(self.allocate, self._planned[0], self.older.in_ram, self.older.disk)
        self._rows.add(made)
        return made

    def held(self) -> dict[str, int]:
        """Return the bytes of keys and values that RAM has memory for now, and those that are on disk."""
        in_ram = sum(rows.in_memory for rows in self._rows) + self.pages_in_ram()
        return {"held_in_ram": in_ram, "held_on_disk": 0 if self.older is None else self.older.disk.space}

    def stats(self) -> list[StreamStats]:
        """Return the counters of all that fetches keys and values."""
        return [*(fetcher.stats for fetcher in self.fetchers.values()), *self.others]
