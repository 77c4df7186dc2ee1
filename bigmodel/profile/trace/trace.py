"""The trace of one forward: its events in order, in segments that layers of one kind share.

A trace names no devices: each event belongs to the unit of the model that was running. `bigmodel.profile.trace.ledger`
replays a trace under any device map, so one recording gives the peaks of all maps. From top to bottom: segments of
events; the `Trace`; cutting one recording into traces (`cut`); condensing events for fast replays (`condense`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from ..model.experts import RouterChoice
from .events import (
    OUTSIDE,
    Allocate,
    Burst,
    Call,
    Enter,
    Event,
    Free,
    Leave,
    Operation,
    OutsideUse,
    Return,
    Route,
    Routed,
    RoutedCall,
    Scratch,
)
from .work import Work


def renamed(event: Event, names: Mapping[int, int], units: Mapping[int, int]) -> Event:
    """Return `event` with its storages and units renumbered by `names` and `units`; those in neither stay."""
    kind = type(event)
    if kind is Operation or kind is Scratch or kind is Burst:
        return event
    if not names and (kind is Free or kind is Call or kind is Return):
        return event
    if isinstance(event, Allocate):
        if not names and event.brought_to is None and event.view_of is None and not event.weights:
            return event
        source = names.get(event.source, event.source)
        to = None if event.brought_to is None else units.get(event.brought_to, event.brought_to)
        view_of = None if event.view_of is None else units.get(event.view_of, event.view_of)
        made_of = tuple(units.get(unit, unit) for unit in event.weights)
        storage = names.get(event.storage, event.storage)
        return Allocate(storage, event.nbytes, source, _named(event.others, names), to, made_of, view_of)
    if isinstance(event, Free):
        return Free(names.get(event.storage, event.storage))
    if isinstance(event, OutsideUse):
        weights = tuple((units.get(unit, unit), nbytes) for unit, nbytes in event.weights)
        alone = tuple(units.get(unit, unit) for unit in event.alone)
        return OutsideUse(weights, names.get(event.source, event.source), alone, event.lasts)
    if isinstance(event, Enter):
        return Enter(units.get(event.unit, event.unit), _named(event.inputs, names))
    if isinstance(event, Leave):
        back_to = None if event.source is None else names.get(event.source, event.source)
        return Leave(units.get(event.unit, event.unit), _named(event.outputs, names), back_to)
    if isinstance(event, Call):
        return Call(_named(event.fresh, names), _named(event.kept, names))
    if isinstance(event, Return):
        given = frozenset(names.get(storage, storage) for storage in event.given)
        return Return(_named(event.outputs, names), given)
    if isinstance(event, RoutedCall):
        return replace(event, condensed=tuple(renamed(each, names, units) for each in event.condensed))
    return event


def _named(tensors: tuple[tuple[int, int], ...], names: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((names.get(storage, storage), nbytes) for storage, nbytes in tensors)


class Segment:
    """Consecutive events. Layers of one kind share a segment, so what follows from it is computed once for all of them.

    Args:
        events: the events, with the numbers of units and storages that they were recorded with.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = tuple(events)

    @cached_property
    def is_closed(self) -> bool:
        """Whether all units and calls of experts that begin in it end in it."""
        kinds = Counter(map(type, self.events))
        return kinds[Enter] == kinds[Leave] and kinds[Route] == kinds[Routed]

    @cached_property
    def units(self) -> tuple[int, ...]:
        """The units that start or end in it, each once."""
        return tuple(dict.fromkeys(event.unit for event in self.events if isinstance(event, (Enter, Leave))))

    @cached_property
    def condensed(self) -> tuple[Event, ...]:
        """The events condensed: see `condense`."""
        return tuple(condense(self.events))

    @cached_property
    def without_workspace(self) -> Segment:
        """The same events without the workspace of kernels."""
        return Segment(event for event in self.events if not isinstance(event, Scratch))

    @cached_property
    def work(self) -> dict[int, list[Work]]:
        """As `Trace.work`."""
        found: dict[int, list[Work]] = {}
        running = [OUTSIDE]
        for event in self.events:
            if isinstance(event, Operation):
                found.setdefault(running[-1], []).append(event.work)
            elif isinstance(event, Enter):
                running.append(event.unit)
            elif isinstance(event, Leave):
                running.pop()
        return found

    @cached_property
    def expert_works(self) -> dict[int, dict[int, tuple[Route, list[Work]]]]:
        """As `Trace.expert_works`."""
        found: dict[int, dict[int, tuple[Route, list[Work]]]] = {}
        unit, works = OUTSIDE, list[Work]()
        for event in self.events:
            if isinstance(event, Enter):
                unit = event.unit
            elif isinstance(event, Route):
                works = []
                found.setdefault(unit, {})[event.position] = event, works
            elif isinstance(event, Routed):
                works = []
            elif isinstance(event, Operation):
                works.append(event.work)
        return found


@dataclass(frozen=True)
class Part:
    """A part of a trace: a segment as it was recorded, or under the numbers of another layer.

    Attributes:
        segment: the events.
        storages: numbers of storages that replace those recorded.
        units: the same of units.
    """

    segment: Segment
    storages: Mapping[int, int] = field(default_factory=dict)
    units: Mapping[int, int] = field(default_factory=dict)

    def renamed(self, events: Iterable[Event]) -> Iterable[Event]:
        """Return events of its segment under its numbers."""
        if not self.storages and not self.units:
            return events
        return (renamed(event, self.storages, self.units) for event in events)


@dataclass(frozen=True)
class InitialStorage:
    """A storage that is alive when the trace begins.

    Attributes:
        storage: its number.
        nbytes: its bytes.
        unit: the unit that allocated it.
        is_output: whether it is an output of this unit, which may be moved to the main device.
    """

    storage: int
    nbytes: int
    unit: int
    is_output: bool = False


_AT_INPUTS = InitialStorage(OUTSIDE, 0, OUTSIDE)
"""Stands for what is not recorded."""


class Trace:
    """One forward: the storages alive at its start (the KV cache so far), and the events in order.

    Args:
        events: the events.
        initial: the storages.
        parts: the events in parts, in the place of `events`.
    """

    def __init__(
        self,
        events: Iterable[Event] = (),
        initial: Iterable[InitialStorage] = (),
        parts: Iterable[Part] | None = None,
    ) -> None:
        self.initial = tuple(initial)
        self.parts = (Part(Segment(events)),) if parts is None else tuple(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and (self.initial, self.events) == (other.initial, other.events)

    def __hash__(self) -> int:
        return hash(self.initial)

    @cached_property
    def changed(self) -> dict[Any, Any]:
        """A cache of traces derived from this one, which the code that derives them fills."""
        return {}

    @cached_property
    def peaks(self) -> dict[object, Any]:
        """A cache of the results of replays, which the code that replays the trace fills."""
        return {}

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events. A deep model has hundreds of thousands: the other attributes are faster."""
        return tuple(chain.from_iterable(part.renamed(part.segment.events) for part in self.parts))

    @cached_property
    def _closed(self) -> tuple[Part, ...]:
        """The parts, or all events as one if a unit runs from one part into the next."""
        if all(part.segment.is_closed for part in self.parts):
            return self.parts
        return (Part(Segment(self.events)),)

    @cached_property
    def condensed(self) -> tuple[Event, ...]:
        """The events condensed for replaying memory: see `condense`."""
        return tuple(chain.from_iterable(part.renamed(part.segment.condensed) for part in self._closed))

    @property
    def outline(self) -> Iterator[Event]:
        """Yield the condensed events, also those within calls of experts: every start and end of a unit or call, and
        the storages that outlive one."""
        for event in self.condensed:
            if isinstance(event, RoutedCall):
                yield from (event.route, *event.condensed, Routed())
            else:
                yield event

    @cached_property
    def without_workspace(self) -> Trace:
        """The same forward without the workspace of kernels."""
        parts = (replace(part, segment=part.segment.without_workspace) for part in self.parts)
        return Trace(initial=self.initial, parts=parts)

    def order(self) -> list[int]:
        """Return the units in the order they first ran."""
        return list(dict.fromkeys(event.unit for event in self.outline if isinstance(event, Enter)))

    def forwards(self) -> set[int]:
        """Return the units whose forward ran, and not another method alone."""
        return {event.unit for event in self.outline if isinstance(event, Leave) and event.source is None}

    def work(self) -> dict[int, Sequence[Work]]:
        """Return the work of each unit's operations, in order; those between units under `OUTSIDE`."""
        found: dict[int, Sequence[Work]] = {}
        for part in self._closed:
            for unit, works in part.segment.work.items():
                unit = part.units.get(unit, unit)
                found[unit] = [*found[unit], *works] if unit in found else works
        return found

    def choices(self) -> dict[int, dict[int, RouterChoice]]:
        """Return the routers' choices by unit, and by position of the experts in the unit."""
        found: dict[int, dict[int, RouterChoice]] = {}
        unit = OUTSIDE
        for event in self.outline:
            if isinstance(event, Enter):
                unit = event.unit
            elif isinstance(event, Route):
                found.setdefault(unit, {})[event.position] = event.choice
        return found

    def expert_works(self) -> dict[int, dict[int, tuple[Route, list[Work]]]]:
        """Return the calls of experts with the work within them, by unit, and by position of the experts in it."""
        found: dict[int, dict[int, tuple[Route, list[Work]]]] = {}
        for part in self._closed:
            for unit, calls in part.segment.expert_works.items():
                found.setdefault(part.units.get(unit, unit), {}).update(calls)
        return found

    @property
    def kept(self) -> int:
        """The bytes that are alive at the end beyond those at the start."""
        alive = {held.storage: held.nbytes for held in self.initial}
        before = sum(alive.values())
        for event in self.outline:
            if isinstance(event, Allocate):
                alive[event.storage] = event.nbytes
            elif isinstance(event, Free):
                alive.pop(event.storage, None)
        return sum(alive.values()) - before

    def left_alive(self) -> dict[int, int]:
        """Return the bytes of storages alive at the end, by the unit that allocated them: its KV cache."""
        made = {held.storage: (held.unit, held.nbytes) for held in self.initial}
        unit = OUTSIDE
        for event in self.outline:
            if isinstance(event, Allocate):
                made[event.storage] = (unit, event.nbytes)
            elif isinstance(event, Free):
                made.pop(event.storage, None)
            elif isinstance(event, Enter):
                unit = event.unit
            elif isinstance(event, Leave):
                unit = OUTSIDE
                if event.source is not None:
                    to = made.get(event.source, (OUTSIDE, 0))[0]
                    moved = (storage for storage, _ in event.outputs if storage in made)
                    made.update({storage: (to, made[storage][1]) for storage in moved})
        found: dict[int, int] = {}
        for unit, nbytes in made.values():
            if unit != OUTSIDE:
                found[unit] = found.get(unit, 0) + nbytes
        return found


def cut(events: list[Event], marks: list[tuple[int, int]]) -> list[Trace]:
    """Cut one recording into traces.

    Args:
        events: all recorded events.
        marks: (first, end) positions of each trace, ascending; events between them belong to none.

    Returns:
        A trace for each mark, with the storages alive at its start.
    """
    traces = []
    alive: dict[int, InitialStorage] = {}
    unit = OUTSIDE
    position = 0
    for first, end in marks:
        for event in events[position:first]:
            unit = _track(event, unit, alive)
        traces.append(Trace(events[first:end], alive.values()))
        position = first
    return traces


def _track(event: Event, unit: int, alive: dict[int, InitialStorage]) -> int:
    if isinstance(event, Allocate):
        alive[event.storage] = InitialStorage(event.storage, event.nbytes, unit)
    elif isinstance(event, Free):
        alive.pop(event.storage, None)
    elif isinstance(event, Enter):
        return event.unit
    elif isinstance(event, Leave):
        made = [storage for storage, _ in event.outputs if storage in alive and alive[storage].unit == event.unit]
        if event.source is None:
            alive.update({storage: replace(alive[storage], is_output=True) for storage in made})
        else:
            to = alive.get(event.source, _AT_INPUTS)
            alive.update({each: replace(alive[each], unit=to.unit, is_output=to.is_output) for each in made})
        return OUTSIDE
    return unit


def condense(events: Iterable[Event], depth: int = 0) -> Iterator[Event]:
    """Yield fewer events that give every device the same peak and final bytes, under any device map.

    A unit executes on one device, so only the peak and the net bytes of its allocations and frees matter (`Burst`), up
    to an event that may concern another device: there, what is alive counts. About ten of the hundreds of events of a
    block remain. Events between units, whose devices depend on their inputs, are kept, and so are those within experts,
    whose chunks depend on the plan (`RoutedCall`). An allocator that rounds each storage needs the original events.

    Args:
        events: the events.
        depth: number of units that run when they begin.
    """
    block: list[Event] = []  # while one unit runs
    following = iter(events)
    for event in following:
        if isinstance(event, Operation):
            continue
        found = _routed(event, following, depth) if isinstance(event, Route) else (event,)
        if depth and not isinstance(event, (Enter, Leave, Call, Return)):
            block += found
            continue
        yield from _together(block)
        block = []
        yield from found
        depth += isinstance(event, Enter) - isinstance(event, Leave)
    yield from _together(block)


def _routed(route: Route, following: Iterator[Event], depth: int) -> Iterator[Event]:
    """Yield a call of experts as one event, whose end is among those that follow."""
    events: list[Event] = []
    for event in following:
        if isinstance(event, Routed):
            yield RoutedCall(route, tuple(events), tuple(condense(events, depth)))
            return
        if not isinstance(event, Operation):
            events.append(event)
    yield from (route, *events)


def _is_elsewhere(event: Event) -> bool:
    """Return whether a storage that is allocated in a unit may lie on another device, or read others that do."""
    return isinstance(event, Allocate) and bool(event.weights or event.others or event.view_of is not None)


def _together(events: Sequence[Event]) -> Iterator[Event]:
    """Yield the events of one unit with bursts in the place of storages that are allocated and freed among them. Other
    allocations come behind the burst that they are in, which counts them."""
    plain = [event for event in events if isinstance(event, (Allocate, Free, Scratch)) and not _is_elsewhere(event)]
    dying = {event.storage for event in plain if isinstance(event, Free)}
    own = {event.storage: event.nbytes for event in plain if isinstance(event, Allocate) and event.storage in dying}
    if len(plain) < len(events):
        for storage in _read_elsewhere(events):
            own.pop(storage, None)
    burst = _OpenBurst()
    for event in events:
        if isinstance(event, Scratch):
            burst.peak = max(burst.peak, burst.now + event.nbytes)
        elif isinstance(event, Allocate) and (event.storage in own or not _is_elsewhere(event)):
            burst.add(event.nbytes)
            if event.storage not in own:
                burst.left.append(event)
        elif isinstance(event, Free) and event.storage in own:
            burst.now -= own[event.storage]
        else:
            yield from burst.events()
            burst = _OpenBurst()
            yield event
    yield from burst.events()


def _read_elsewhere(events: Iterable[Event]) -> Iterator[int]:
    """Yield the storages that events read that may happen on another device than that of the running unit."""
    for event in events:
        if isinstance(event, RoutedCall):
            yield from _read_elsewhere(event.events)
        elif isinstance(event, OutsideUse):
            yield event.source
        elif isinstance(event, Allocate) and _is_elsewhere(event):
            yield event.source
            yield from (storage for storage, _ in event.others)


@dataclass
class _OpenBurst:
    """Bytes since the last event that was kept: now, at most, and the allocations that are not freed in the block."""

    now: int = 0
    peak: int = 0
    left: list[Allocate] = field(default_factory=list)

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def events(self) -> Iterator[Event]:
        net = self.now - sum(event.nbytes for event in self.left)
        if net or self.peak > self.now:
            yield Burst(self.peak, net)
        yield from self.left
