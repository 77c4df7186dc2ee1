"""Pages of some layers on the host, which accelerators read through slots that are filled ahead of use.

    store:  queue the copies of a layer's new keys and values to their pages, behind the compute that makes them
    read:   wait until what a step reads of the layer has arrived in a slot; put the step's own rows in their places
            there; queue the copies of the layer that comes next, into another slot

All copies of one accelerator are queued on one stream, in order: rows are on the host before they are fetched again,
and a slot is overwritten once the attention that reads it has been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from bigmodel.devices import HOST, CopyStream, Event, copy_stream
from bigmodel.devices.pinned import on_device
from bigmodel.dispatch.weights.visits import StreamStats

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Targets and sources."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What attention reads of each layer at once.

    Attributes:
        rows: Positions of the arena, on the host, in the order that they are read in.
        fresh: Parts of ``rows`` that the step itself computes: where each begins there, at which of the step's rows,
            and how many rows it has.
    """

    rows: torch.Tensor
    fresh: tuple[tuple[int, int, int], ...]

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Begin and end of consecutive positions, in order."""
        return consecutive(self.rows)

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in ``rows`` of the step's own, and the step's rows that belong there, on the host."""
        found = [
            torch.cat([torch.arange(part[which], part[which] + part[2]) for part in self.fresh]) for which in (0, 1)
        ]
        return found[0], found[1]


def consecutive(rows: torch.Tensor) -> list[tuple[int, int]]:
    """Return begin and end of each run of consecutive numbers in ``rows``, of at least one."""
    ends = (rows.diff() != 1).nonzero().flatten()
    begins = rows[torch.cat([torch.zeros(1, dtype=torch.long), ends + 1])]
    lasts = rows[torch.cat([ends, torch.tensor([len(rows) - 1])])]
    return [(begin, last + 1) for begin, last in zip(begins.tolist(), lasts.tolist(), strict=True)]


class HostPages:
    """Pages of some layers of an arena, on the host.

    Args:
        positions: Of all pages.
        layers: Indices of the layers.
        slots: Layers with memory on an accelerator at once.
        allocate: Returns host memory of a number of bytes.
    """

    def __init__(
        self, positions: int, layers: Collection[int], slots: int, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        self.layers = frozenset(layers)
        self.stats = StreamStats()
        self._positions = positions
        self._slots = slots
        self._allocate = allocate
        self._pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._links: dict[torch.device, _Link] = {}

    def written(self) -> Seq[int]:
        """Indices of the layers written so far."""
        return list(self._pages)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``index`` [positions, key-value heads, dim], once all copies have arrived."""
        for link in self._links.values():
            link.synchronize()
        return self._pages[index]

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key`` and ``value`` [tokens, key-value heads, dim] at the positions ``rows`` at once."""
        self._make(layer, key, value)
        for pages, new in zip(self.layer(layer), (key, value), strict=True):
            pages.index_copy_(0, rows.to(HOST), new.to(HOST))

    def store(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Queue the copies of ``key`` and ``value`` to the positions ``rows``, on the host; `read` puts them in their
        places beside what has been there."""
        self._make(layer, key, value)
        if key.device not in self._links:
            self._links[key.device] = _Link(key.device, self._slots, self._positions, self.stats)
        self._links[key.device].store(layer, consecutive(rows), self._pages[layer], (key, value))

    def read(
        self, layer: int, window: int | None, readings: Seq[Reading], number: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [positions read, key-value heads, dim] of layer ``layer`` on ``device``, in memory
        that stays as it is until the next call.

        Args:
            layer: The layer that was stored last.
            window: Its window; layers of the same have the same ``readings``.
            readings: All of a step, in order.
            number: Which of them.
            device: Where the layer runs.
        """
        with torch.inference_mode(False), torch.no_grad():  # slots are ordinary memory, whatever reads them
            return self._links[device].read(layer, window, readings, number, self._pages)

    def begin(self, readings_of: Callable[[torch.device, int | None], Seq[Reading]]) -> None:
        """Start copying what a step reads first, as far as that is known from an earlier one."""
        for device, link in self._links.items():
            link.begin(partial(readings_of, device), self._pages)

    def _make(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer not in self._pages:
            with torch.inference_mode(False), torch.no_grad():
                made = [self._new(like) for like in (key, value)]
                self._pages[layer] = made[0], made[1]

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        shape = self._positions, like.shape[1], like.shape[2]
        nbytes = shape[0] * shape[1] * shape[2] * like.element_size()
        return self._allocate(nbytes).view(like.dtype).view(shape)


class _Slot:
    """Memory of an accelerator for the keys and values that one layer reads."""

    def __init__(self) -> None:
        self.memory: list[torch.Tensor] = []
        self.of: tuple[int, Reading] | None = None
        self.arrived: Event | None = None

    def holds(self, layer: int, reading: Reading) -> bool:
        return self.of is not None and self.of[0] == layer and self.of[1] is reading


class _Link:
    """The slots of one accelerator, and the stream of its copies."""

    def __init__(self, device: torch.device, slots: int, positions: int, stats: StreamStats) -> None:
        self._device = device
        self._positions = positions
        self._slots = [_Slot() for _ in range(max(slots, 1))]  # the one used longest ago is first
        self._stream: CopyStream = copy_stream(device)
        self._stats = stats
        self._windows: dict[int, int | None] = {}  # of the layers that run on the device
        self._new: tuple[int, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._placed: tuple[Reading, torch.Tensor, torch.Tensor] | None = None

    def synchronize(self) -> None:
        """Block the calling thread until all copies have been made."""
        self._queue([]).synchronize()

    def store(
        self,
        layer: int,
        runs: Seq[tuple[int, int]],
        pages: tuple[torch.Tensor, torch.Tensor],
        new: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """See `HostPages.store`; ``runs`` has the positions."""
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
        self,
        layer: int,
        window: int | None,
        readings: Seq[Reading],
        number: int,
        pages: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `HostPages.read`."""
        self._windows[layer] = window
        reading = readings[number]
        computed = self._stream.compute_mark()  # before it waits for this slot: the next copy need not
        slot = self._slot_of(layer, reading, pages)
        following = self._following(layer)
        if len(self._slots) == 1:
            pass  # what is read next would overwrite this
        elif number + 1 < len(readings):
            self._fetch(layer, readings[number + 1], pages, computed)
        elif following is not None and self._windows[following] == window:
            self._fetch(following, readings[0], pages, computed)
        self._put_new(layer, reading, slot)
        keys, values = (
            _as_rows(memory, like, len(reading.rows)) for memory, like in zip(slot.memory, pages[layer], strict=True)
        )
        return keys, values

    def begin(
        self, readings_of: Callable[[int | None], Seq[Reading]], pages: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """See `HostPages.begin`."""
        for layer in sorted(self._windows)[: len(self._slots)]:
            self._fetch(layer, readings_of(self._windows[layer])[0], pages)

    def _following(self, layer: int) -> int | None:
        return min((each for each in self._windows if each > layer), default=None)

    def _slot_of(self, layer: int, reading: Reading, pages: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> _Slot:
        """Return the slot with what the layer reads, which all later compute waits for."""
        found = any(slot.holds(layer, reading) for slot in self._slots)
        self._stats.hits, self._stats.misses = self._stats.hits + found, self._stats.misses + (not found)
        if not found:
            self._fetch(layer, reading, pages)
        slot = next(slot for slot in self._slots if slot.holds(layer, reading))
        arrived, slot.arrived = slot.arrived, None
        if arrived is not None:
            try:
                arrived.wait()
            except BaseException:
                slot.of = None
                raise
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    def _fetch(
        self,
        layer: int,
        reading: Reading,
        pages: dict[int, tuple[torch.Tensor, torch.Tensor]],
        computed: Event | None = None,
    ) -> None:
        """Start copying what a layer reads into the slot used longest ago, unless a slot has it.

        Args:
            layer: The layer.
            reading: What it reads.
            pages: Pages on the host, by layer.
            computed: The event after which nothing reads that slot; None: of all compute launched so far.
        """
        if any(slot.holds(layer, reading) for slot in self._slots):
            return
        slot = self._slots[0]
        copies: Copies = []
        with torch.inference_mode(False), torch.no_grad():
            for which, held in enumerate(pages[layer]):
                memory = self._at_least(slot, which, len(reading.rows), held)
                target, at = _as_rows(memory, held, len(reading.rows)), 0
                for begin, end in reading.runs:
                    copies.append((target[at : at + end - begin], held[begin:end]))
                    at += end - begin
        slot.of = layer, reading
        slot.arrived = self._queue(copies, computed)
        self._slots.remove(slot)
        self._slots.append(slot)
        self._stats.add_fetch(sum(source.nbytes for _, source in copies))

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

        after = [self._stream.compute_mark() if computed is None else computed]
        return self._stream.submit(work, after, sum(source.nbytes for _, source in copies))


def _as_rows(memory: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the begin of a slot's memory as ``rows`` rows of the shape and dtype of those of ``like``."""
    return memory[: rows * like[0].nbytes].view(like.dtype).view(rows, *like.shape[1:])
