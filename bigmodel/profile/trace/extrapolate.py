"""Extrapolates the trace of a deep model from that of its first few layers.

A dry run of every layer of a 126-layer model would take seconds, and layers of one kind all do the same. So only a
sample of the layers is run (`LayerSample`), and `extrapolate` repeats what the sampled ones did for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from .equal_modules import CONTEXT, LayerSample
from .events import Allocate, Enter, Event, Free
from .trace import InitialStorage, Part, Segment, Trace, renamed


class CannotExtrapolate(Exception):
    """The recorded trace does not repeat layer by layer."""


def refuse_gathered(sample: LayerSample, gathered: Iterable[Collection[int]]) -> None:
    """Refuse a sample if one operation reads what many of its blocks have made, as one that stacks their outputs: what
    it makes grows with the number of blocks.

    Args:
        sample: the blocks that were run.
        gathered: for each operation, the recorded units whose results it reads.

    Raises:
        CannotExtrapolate: an operation reads the results of more than `CONTEXT` of the blocks.
    """
    run = set(sample.units[: sample.count])
    if any(len(run.intersection(units)) > CONTEXT for units in gathered):
        raise CannotExtrapolate(f"what the blocks of {sample.path} make is gathered by one operation")


def extrapolate(trace: Trace, sample: LayerSample) -> Trace:
    """Return the trace of the full list of blocks from that of the sampled ones.

    Raises:
        CannotExtrapolate: a block ran not exactly once or out of order, or layers of one kind left different storages
            alive.
    """
    return _Extrapolation(trace, sample).run()


class _Extrapolation:
    """Builds the full trace: head, the sampled layers but the last, these again for the others, tail."""

    def __init__(self, trace: Trace, sample: LayerSample) -> None:
        self.trace = trace
        self.sample = sample
        self.next = 1 + _highest_storage(trace)  # number of the next new storage
        self.parts: list[Part] = []
        self.initial = list(trace.initial)
        self.copies: list[tuple[int, Mapping[int, int]]] = []  # of each layer that was not run: stand-in, storages
        self.left: list[list[int]] = []  # by layer of the full list: its storages alive when the next begins
        self.own: dict[int, list[int]] = {}  # by layer of the full list: its storages alive before the trace

    def run(self) -> Trace:
        starts = self._starts()
        if not starts:
            self._extend_initial()
            return Trace(initial=self.initial, parts=self.trace.parts)
        count = self.sample.count
        events = self.trace.events
        layers = [_Layer(events[starts[p] : starts[p + 1]]) for p in range(count - 1)]
        self.parts += [Part(Segment(events[: starts[0]])), *(Part(layer.segment) for layer in layers)]
        self.left += [layer.left for layer in layers]
        self._extend_initial()
        for number in range(count - 1, len(self.sample.stand_ins) - 1):
            self._copy(layers[self.sample.stand_ins[number]], number)
        self.parts.append(Part(Segment(self._tail(events[: starts[-1]], events[starts[-1] :], layers))))
        return Trace(initial=self.initial, parts=self.parts)

    def _starts(self) -> list[int]:
        """Return the position of the event at which each sampled layer starts; none if the list does not run."""
        sampled = self.sample.units[: self.sample.count]
        entries = [(i, e.unit) for i, e in enumerate(self.trace.events) if isinstance(e, Enter)]
        starts = [(i, unit) for i, unit in entries if unit in sampled]
        if starts and [unit for _, unit in starts] != list(sampled):
            raise CannotExtrapolate(f"the blocks of {self.sample.path} do not run once each, in order")
        return [i for i, _ in starts]

    def _extend_initial(self) -> None:
        """Give each layer that was not run its own initial storages, like those of the layer that stands for it."""
        by_unit: dict[int, list[InitialStorage]] = {}
        for item in self.trace.initial:
            by_unit.setdefault(item.unit, []).append(item)
        last = len(self.sample.stand_ins) - 1
        for layer, stand_in in enumerate(self.sample.stand_ins):
            originals = by_unit.get(self.sample.units[stand_in], [])
            if layer < self.sample.count - 1:
                self.own[layer] = [item.storage for item in originals]
            elif layer < last:
                unit = self.sample.units[layer]
                self.own[layer] = self._new(len(originals))
                self.initial += [
                    replace(item, storage=storage, unit=unit)
                    for item, storage in zip(originals, self.own[layer], strict=True)
                ]
        last_sampled = self.sample.units[self.sample.count - 1]
        self.initial = [
            replace(item, unit=self.sample.units[last])
            if item.unit == last_sampled and item in self.trace.initial
            else item
            for item in self.initial
        ]

    def _new(self, count: int) -> list[int]:
        """Return numbers for new storages."""
        self.next += count
        return [*range(self.next - count, self.next)]

    def _copy(self, layer: _Layer, number: int) -> None:
        """Append the events of layer `number`: those of its stand-in, with storages of its own."""
        stand_in = self.sample.stand_ins[number]
        names = dict(zip(self.own[stand_in], self.own[number], strict=True))
        for back in range(1, CONTEXT + 1):
            there, here = self.left[stand_in - back], self.left[number - back]
            if len(there) != len(here):
                raise CannotExtrapolate(f"equal blocks of {self.sample.path} leave different storages alive")
            names.update(zip(there, here, strict=True))
            names.update(zip(self.own[stand_in - back], self.own[number - back], strict=True))
        if not layer.freed_of_others <= names.keys():
            raise CannotExtrapolate(f"a block of {self.sample.path} frees what was allocated far before it")
        names.update(zip(layer.made, self._new(len(layer.made)), strict=True))
        units = {self.sample.units[stand_in]: self.sample.units[number]}
        self.parts.append(Part(layer.segment, names, units))
        self.copies.append((stand_in, names))
        self.left.append([names[storage] for storage in layer.left])

    def _tail(self, run: Sequence[Event], tail: Sequence[Event], layers: Sequence[_Layer]) -> Iterator[Event]:
        """Yield the last layer and what follows; it refers to the last copies in place of the last sampled layers.

        Args:
            run: the recorded events before it.
            tail: its events as recorded.
            layers: the sampled layers but the last.
        """
        count, total = self.sample.count, len(self.sample.stand_ins)
        names: dict[int, int] = {}
        for back in range(CONTEXT, 0, -1):
            names.update(zip(self.left[count - 1 - back], self.left[total - 1 - back], strict=True))
        units = {self.sample.units[count - 1]: self.sample.units[-1]}
        dead = {event.storage for event in run if isinstance(event, Free)}
        dead.update(copied[storage] for by, copied in self.copies for storage in layers[by].freed_of_others)
        for event in tail:
            if not isinstance(event, Free):
                yield renamed(event, names, units)
                continue
            family = {event.storage, names.get(event.storage, event.storage)}
            family.update(copied[event.storage] for by, copied in self.copies if event.storage in layers[by].own)
            yield from (Free(storage) for storage in sorted(family - dead))
            dead |= family


class _Layer:
    """The events of a sampled layer, until the next begins.

    Attributes:
        segment: the events.
        made: the storages that it allocates, in order.
        own: the same as a set.
        left: those of them that it leaves alive.
        freed_of_others: storages that it frees and has not allocated.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.segment = Segment(events)
        self.made = [event.storage for event in events if isinstance(event, Allocate)]
        self.own = set(self.made)
        freed = {event.storage for event in events if isinstance(event, Free)}
        self.left = [storage for storage in self.made if storage not in freed]
        self.freed_of_others = freed - self.own


def _highest_storage(trace: Trace) -> int:
    made = [event.storage for event in trace.events if isinstance(event, Allocate)]
    return max([item.storage for item in trace.initial] + made, default=0)
