"""The slots of one accelerator for keys and values of pages on the host, and the copies that fill them.

All copies of one accelerator are queued on one stream, in order: rows are on the host before they are fetched again,
and a slot is overwritten once the attention that reads it has been computed. While a step's last layers are computed,
what the next step is expected to read first is fetched; a step that reads something else fetches that anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq

import torch

from bigmodel.devices import CopyStream, Event, copy_stream
from bigmodel.devices.pinned import on_device
from bigmodel.dispatch.streaming.host_kv import OlderRows
from bigmodel.dispatch.streaming.kv_reader import AllOf, Arrival, KVReader
from bigmodel.dispatch.weights.visits import StreamStats
from bigmodel.server.engine.kv.reading import Reading, StepReadings

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Targets and sources."""

Spans = Callable[[int, int, int, int], Iterable[tuple[bool, torch.Tensor]]]
"""Layer, keys (0) or values (1), begin and end of positions -> whether RAM has each span of them, and a view of it."""


class _Slot:
    """Memory of an accelerator for the keys and values that one layer reads."""

    def __init__(self) -> None:
        self.memory: list[torch.Tensor] = []
        self.of: tuple[int, Reading] | None = None
        self.is_ahead = False  # of the next step, which may read something else
        self.arrived: Event | None = None
        self.reads: list[Arrival] = []  # the last of a reader, which queues its copies some time later

    @property
    def layer(self) -> int:
        """The layer whose keys and values it has."""
        assert self.of is not None
        return self.of[0]

    def holds(self, layer: int, reading: Reading) -> bool:
        """Whether it has what the layer reads, or this is on the way to it."""
        return self.of is not None and self.of[0] == layer and self.of[1] is reading

    def queued(self) -> None:
        """Wait until no reader queues copies to it any more."""
        for read in self.reads:
            read.queued()


class PageLink:
    """The slots of one accelerator, and the stream of its copies.

    Args:
        device: The accelerator.
        slots: Layers with memory on it at once.
        positions: Of all pages: what a slot has memory for.
        stats: Counters of bytes.
        older: Where pages are on disk; None: RAM has all.
        pages: What RAM has, by layer.
        spans: Returns where positions lie.
    """

    def __init__(
        self,
        device: torch.device,
        slots: int,
        positions: int,
        stats: StreamStats,
        older: OlderRows | None,
        pages: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        spans: Spans,
    ) -> None:
        self._device = device
        self._positions = positions
        self._slots = [_Slot() for _ in range(max(slots, 1))]  # the one used longest ago is first
        self._stream: CopyStream = copy_stream(device)
        self._stats = stats
        self._pages = pages
        self._spans = spans
        self._reader: KVReader | None = None
        if older is not None:
            staging = older.staging[device]
            self._reader = KVReader(self._stream, device, older.disk.policy, stats, staging, older.readers)
        self._windows: dict[int, int | None] = {}  # of the layers that run on the device
        self._new: tuple[int, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._placed: tuple[Reading, torch.Tensor, torch.Tensor] | None = None

    def mark(self) -> Event:
        """Return the event after which all copies of what has been stored and fetched so far have been made."""
        for slot in self._slots:
            slot.queued()
        return self._queue([])

    def synchronize(self) -> None:
        """Block the calling thread until all copies have been made."""
        self.mark().synchronize()

    def store(
        self,
        layer: int,
        runs: Seq[tuple[int, int]],
        pages: tuple[torch.Tensor, torch.Tensor],
        new: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """See `HostPages.store`; ``runs`` has the positions, in memory of the host."""
        copies: Copies = []
        kept = new[0].contiguous(), new[1].contiguous()
        for held, own in zip(pages, kept, strict=True):
            self._stream.uses(own)
            at = 0
            for begin, end in runs:
                copies.append((held[begin:end], own[at : at + end - begin]))
                at += end - begin
        self._queue(copies)
        self._new = layer, kept

    def read(
        self, step: StepReadings, layer: int, window: int | None, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `HostPages.read`."""
        is_known = layer in self._windows
        self._windows[layer] = window
        readings = step.readings(self._device, window)
        reading = readings[number]
        slot = self._slot_of(layer, reading)
        following = self._following(layer)
        if len(self._slots) == 1:
            pass  # what is read next would overwrite this
        elif number + 1 < len(readings):
            self._fetch(layer, readings[number + 1])
        elif following is not None:
            self._fetch(following, step.readings(self._device, self._windows[following])[0])
        elif is_known:  # in the first step each layer seems to be the last one
            self._fetch_ahead(step)
        self._await(slot, reading)  # only now: the next copies need not wait for these
        self._put_new(layer, reading, slot)
        keys, values = (
            _as_rows(memory, like, len(reading.rows))
            for memory, like in zip(slot.memory, self._pages[layer], strict=True)
        )
        return keys, values

    def begin(self, step: StepReadings) -> None:
        """See `HostPages.begin`."""
        first = {
            layer: step.readings(self._device, self._windows[layer])[0]
            for layer in sorted(self._windows)[: len(self._slots)]
        }
        for slot in [slot for slot in self._slots if slot.is_ahead]:
            assert slot.of is not None
            layer, expected = slot.of
            if layer in first and first[layer].fetches(expected):
                slot.of, slot.is_ahead = (layer, first[layer]), False
            else:
                self._drop(slot)
        for layer, reading in first.items():
            self._fetch(layer, reading)

    def outdate(self) -> None:
        """Forget what was fetched for the next step: pages are written to before."""
        for slot in [slot for slot in self._slots if slot.is_ahead]:
            self._drop(slot)

    def _fetch_ahead(self, step: StepReadings) -> None:
        """Start fetching what the next step reads first, if that is known, while the last layer is computed."""
        for layer in sorted(self._windows)[: len(self._slots) - 1]:
            expected = step.ahead(self._windows[layer])
            if expected is not None:
                self._fetch(layer, expected, is_ahead=True)

    def _drop(self, slot: _Slot) -> None:
        """Have a slot hold nothing, and be overwritten next: its reads end then."""
        slot.of, slot.is_ahead = None, False
        self._slots.remove(slot)
        self._slots.insert(0, slot)

    def _following(self, layer: int) -> int | None:
        return min((each for each in self._windows if each > layer), default=None)

    def _slot_of(self, layer: int, reading: Reading) -> _Slot:
        """Return the slot that has what the layer reads, or that this is on the way to."""
        found = any(slot.holds(layer, reading) for slot in self._slots)
        self._stats.hits, self._stats.misses = self._stats.hits + found, self._stats.misses + (not found)
        if not found:
            self._fetch(layer, reading)
        slot = next(slot for slot in self._slots if slot.holds(layer, reading))
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    def _await(self, slot: _Slot, reading: Reading) -> None:
        """Have all later compute wait for what a slot gets, and complete it."""
        arrived, slot.arrived = slot.arrived, None
        if arrived is None:
            return
        begun = time.perf_counter()
        try:
            arrived.wait()
        except BaseException:
            slot.of = None
            raise
        self._stats.add(waited=time.perf_counter() - begun)
        for memory, like in zip(slot.memory, self._pages[slot.layer], strict=True):
            rows = _as_rows(memory, like, len(reading.rows))
            for at, of, count in reading.parts[1]:
                rows[at : at + count].copy_(rows[of : of + count])

    def _fetch(self, layer: int, reading: Reading, is_ahead: bool = False) -> None:
        """Start copying what a layer reads into the slot used longest ago, behind all compute launched so far, unless a
        slot has it."""
        if any(slot.holds(layer, reading) for slot in self._slots):
            return
        slot, pages = self._slots[0], self._pages[layer]
        copies: Copies = []
        arriving: list[Arrival] = []
        with torch.inference_mode(False), torch.no_grad():
            memory = [self._at_least(slot, which, len(reading.rows), held) for which, held in enumerate(pages)]
            computed = self._stream.compute_mark()
            for which, held in enumerate(pages):
                sources = list(self._sources(layer, which, reading))
                if self._reader is not None and not all(in_ram for _, in_ram, _ in sources):
                    placed = ((at * held[0].nbytes, source) for at, _, source in sources)
                    arriving.append(self._reader.fetch(placed, memory[which], [computed]))
                    continue
                target = _as_rows(memory[which], held, len(reading.rows))
                copies += [(target[at : at + len(source)], source) for at, _, source in sources]
        queued: list[Event] = []
        if not arriving and (copies or slot.arrived is not None):  # what nobody has waited for is overwritten, too
            slot.queued()
            queued.append(self._queue(copies, computed))
        slot.of, slot.is_ahead, slot.reads = (layer, reading), is_ahead, arriving
        slot.arrived = AllOf([*arriving, *queued])
        self._slots.remove(slot)
        self._slots.append(slot)
        self._stats.add_fetch(sum(source.nbytes for _, source in copies))

    def _sources(self, layer: int, which: int, reading: Reading) -> Iterator[tuple[int, bool, torch.Tensor]]:
        """Yield the place of each span of keys or values that is fetched, whether RAM has it, and the span."""
        for at, begin, end in reading.parts[0]:
            for in_ram, span in self._spans(layer, which, begin, end):
                yield at, in_ram, span
                at += len(span)

    def _at_least(self, slot: _Slot, which: int, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Return a slot's memory of keys or values: that of all positions, which is planned, or of what is read more
        than once."""
        row = like[0].nbytes
        if len(slot.memory) <= which or slot.memory[which].nbytes < rows * row:
            memory = torch.empty(max(rows, self._positions) * row, dtype=torch.uint8, device=self._device)
            self._stream.uses(memory)
            slot.memory[which : which + 1] = [memory]
        return slot.memory[which]

    def _put_new(self, layer: int, reading: Reading, slot: _Slot) -> None:
        """Put the rows that the step computes into their places: they were not on the host when these were copied."""
        if not reading.fresh:
            return
        assert self._new is not None
        assert self._new[0] == layer
        if self._placed is None or self._placed[0] is not reading:
            at, sources = (on_device(each, self._device) for each in reading.places)
            self._placed = reading, at, sources
        _, at, sources = self._placed
        for memory, new in zip(slot.memory, self._new[1], strict=True):
            _as_rows(memory, new, len(reading.rows)).index_copy_(0, at, new.index_select(0, sources))

    def _queue(self, copies: Copies, computed: Event | None = None) -> Event:
        """Queue copies behind an event of compute; None: behind all that was launched so far."""

        def work() -> None:
            with torch.inference_mode(False), torch.no_grad():
                for target, source in copies:
                    target.copy_(source, non_blocking=True)

        after = self._stream.compute_mark() if computed is None else computed
        return self._stream.submit(work, [after], sum(source.nbytes for _, source in copies))


def _as_rows(memory: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the begin of a slot's memory as ``rows`` rows of the shape and dtype of those of ``like``."""
    return memory[: rows * like[0].nbytes].view(like.dtype).view(rows, *like.shape[1:])
