"""What happens in a forward as far as memory and time go: the events that a trace consists of.

The life of every activation in one forward, as a list of events, and the peak it makes on each device.

A trace does not know devices: it says which unit of the model was running when a storage came to life. Peaks for
any device map are then computed from the one trace, with the copies of inputs that cross from device to device.

Cuts one long recording into traces that know what is alive at their start.

The events of a trace that books of memory need: what lives and dies within a unit's turn is taken together.

A unit runs on one device, so of what it allocates and frees before anything else happens only the most at once
matters. Of hundreds of events of a block some ten remain, and every device map is weighed by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..model.experts import Choice
from .work import Work

OUTSIDE = -1
"""The unit index of what runs between units."""


@dataclass(frozen=True)
class Allocate:
    """A storage of `nbytes` comes to life.

    Outside of units its device is that of `source`, a storage the operation read. If it read none (`OUTSIDE`), it is
    made beside what the unit before returned, as `torch.ones(..., device=embedded.device)` is. What else was read,
    `others`, as (storage, bytes of the tensor), is brought there for it from where it lies.
    """

    storage: int
    nbytes: int
    source: int = OUTSIDE
    others: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Free:
    """A storage dies."""

    storage: int


@dataclass(frozen=True)
class Scratch:
    """A kernel takes `nbytes` of its own while it runs."""

    nbytes: int


@dataclass(frozen=True)
class Enter:
    """A unit starts; `inputs` are (storage, bytes of the tensor) of what it was called with."""

    unit: int
    inputs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Leave:
    """A unit ends; `outputs` are (storage, bytes of the tensor) of what it returned."""

    unit: int
    outputs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Operation:
    """An operation runs; `work` is what takes it time."""

    work: Work


@dataclass(frozen=True)
class Call:
    """`generate` calls the model with inputs made for this call, `fresh` as (storage, bytes of the tensor), and with
    some it keeps, `kept` bytes.

    It brings them to where the model's first weights lie. Where that is not where the model begins, the dispatched
    model brings them back while it runs: then those that are kept are there twice.
    """

    fresh: tuple[tuple[int, int], ...] = ()
    kept: int = 0


@dataclass(frozen=True)
class Return:
    """The model returns `outputs`, (storage, bytes of the tensor), which it brings to where its inputs came from.

    Those that were among the inputs, `given`, stay where they lie as well.
    """

    outputs: tuple[tuple[int, int], ...] = ()
    given: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Route:
    """Tokens come to experts that can be fetched one by one.

    Attributes:
        position: of the experts in the unit.
        choice: which they go to.
        nbytes: bytes of the tokens.
        counted: whether the tokens of each expert are counted, which "batched_mm" has no need to.
    """

    position: int
    choice: Choice
    nbytes: int = 0
    counted: bool = True


@dataclass(frozen=True)
class Routed:
    """The experts are done."""


@dataclass(frozen=True)
class Burst:
    """What a unit allocates for itself for a while: `peak` bytes more at most, and `net` more at the end."""

    peak: int
    net: int


Event = Allocate | Free | Scratch | Enter | Leave | Operation | Call | Return | Route | Routed | Burst


__all__ = [
    "OUTSIDE",
    "Allocate",
    "Burst",
    "Call",
    "Enter",
    "Event",
    "Free",
    "Held",
    "Leave",
    "Operation",
    "Return",
    "Route",
    "Routed",
    "Scratch",
    "Trace",
]


@dataclass(frozen=True)
class Held:
    """A storage that is alive before the trace begins: its bytes, and the unit that made it."""

    storage: int
    nbytes: int
    unit: int


@dataclass(frozen=True)
class Trace:
    """One forward: what is alive at its start (the KV cache so far), and what happens, in order."""

    events: tuple[Event, ...]
    initial: tuple[Held, ...] = ()

    @cached_property
    def condensed(self) -> tuple[Event, ...]:
        """The events as far as books of memory need them, fewer: see `condense`."""
        return tuple(condense(self.events))

    @cached_property
    def without_workspace(self) -> Trace:
        """The same forward with kernels that take nothing for themselves."""
        return Trace(tuple(event for event in self.events if not isinstance(event, Scratch)), self.initial)

    def order(self) -> list[int]:
        """Return the units in the order they first ran."""
        return list(dict.fromkeys(event.unit for event in self.events if isinstance(event, Enter)))

    def work(self) -> dict[int, list[Work]]:
        """Return what each unit's operations take time for; `OUTSIDE` has those between units."""
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

    def choices(self) -> dict[int, dict[int, Choice]]:
        """Return what routers chose, by unit and by position of the experts in the unit."""
        found: dict[int, dict[int, Choice]] = {}
        unit = OUTSIDE
        for event in self.events:
            if isinstance(event, Enter):
                unit = event.unit
            elif isinstance(event, Route):
                found.setdefault(unit, {})[event.position] = event.choice
        return found

    def left_alive(self) -> dict[int, int]:
        """Return the bytes alive at the end that units made, by unit: their KV cache."""
        made = {held.storage: (held.unit, held.nbytes) for held in self.initial}
        unit = OUTSIDE
        for event in self.events:
            if isinstance(event, Allocate):
                made[event.storage] = (unit, event.nbytes)
            elif isinstance(event, Free):
                made.pop(event.storage, None)
            elif isinstance(event, Enter):
                unit = event.unit
            elif isinstance(event, Leave):
                unit = OUTSIDE
        found: dict[int, int] = {}
        for unit, nbytes in made.values():
            if unit != OUTSIDE:
                found[unit] = found.get(unit, 0) + nbytes
        return found


def cut(events: list[Event], marks: list[tuple[int, int]]) -> list[Trace]:
    """Cut one long recording into traces.

    Args:
        events: everything recorded.
        marks: (first, end) positions of each trace, ascending; what lies between belongs to none.

    Returns:
        One trace each, with what is alive at its start.
    """
    traces = []
    alive: dict[int, Held] = {}
    unit = OUTSIDE
    position = 0
    for first, end in marks:
        for event in events[position:first]:
            unit = _follow_life(event, unit, alive)
        traces.append(Trace(tuple(events[first:end]), tuple(alive.values())))
        for event in events[first:end]:
            unit = _follow_life(event, unit, alive)
        position = end
    return traces


def _follow_life(event: Event, unit: int, alive: dict[int, Held]) -> int:
    if isinstance(event, Allocate):
        alive[event.storage] = Held(event.storage, event.nbytes, unit)
    elif isinstance(event, Free):
        alive.pop(event.storage, None)
    elif isinstance(event, Enter):
        return event.unit
    elif isinstance(event, Leave):
        return OUTSIDE
    return unit


def condense(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events that give every device the same bytes at its highest mark and at the end, under any device map.

    Bytes are taken as they are: for an allocator that rounds each storage the events themselves are needed. What is
    between units, where devices depend on what is read, and what experts do, whose room is not known, stays as it is.
    """
    pending: list[Event] = []
    depth, routed = 0, False
    for event in events:
        if isinstance(event, Operation):
            continue
        if depth and not routed and isinstance(event, (Allocate, Free, Scratch)):
            pending.append(event)
            continue
        yield from _together(pending)
        pending = []
        yield event
        depth += isinstance(event, Enter) - isinstance(event, Leave)
        routed = isinstance(event, Route) or (routed and not isinstance(event, Routed))
    yield from _together(pending)


def _together(events: Sequence[Event]) -> Iterator[Event]:
    """Yield bursts in place of the storages that live and die within `events`, and the other events."""
    dying = {event.storage for event in events if isinstance(event, Free)}
    own = {event.storage: event.nbytes for event in events if isinstance(event, Allocate) and event.storage in dying}
    now = peak = 0
    for event in events:
        if isinstance(event, Scratch):
            peak = max(peak, now + event.nbytes)
        elif isinstance(event, Allocate) and event.storage in own:
            now += event.nbytes
            peak = max(peak, now)
        elif isinstance(event, Free) and event.storage in own:
            now -= own[event.storage]
        else:
            if now or peak:
                yield Burst(peak, now)
            now = peak = 0
            yield event
    if now or peak:
        yield Burst(peak, now)
