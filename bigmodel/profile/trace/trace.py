"""The life of every activation in one forward, as a list of events, and the peak it makes on each device.

A trace does not know devices: it says which unit of the model was running when a storage came to life. Peaks for
any device map are then computed from the one trace, with the copies of inputs that cross from device to device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..model.experts import Choice
from .condense import condense
from .events import OUTSIDE, Allocate, Burst, Call, Enter, Event, Free, Leave, Operation, Return, Route, Routed, Scratch
from .work import Work

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
