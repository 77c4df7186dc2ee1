"""The life of every activation in one forward, as a list of events, and the peak it makes on each device.

A trace does not know devices: it says which unit of the model was running when a storage came to life. Peaks for
any device map are then computed from the one trace, with the copies of inputs that cross from device to device.
"""

from __future__ import annotations

from dataclasses import dataclass

from .experts import Choice
from .work import Work

OUTSIDE = -1
"""The unit index of what runs between units."""


@dataclass(frozen=True)
class Allocate:
    """A storage of `nbytes` comes to life.

    Outside of units its device is that of `source`, a storage the operation read (`OUTSIDE` if there is none).
    """

    storage: int
    nbytes: int
    source: int = OUTSIDE


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
    """`generate` calls the model with inputs made for this call, `fresh` bytes, and with some it keeps, `kept` bytes.

    It brings them to where the model's first weights lie. Where that is not where the model begins, the dispatched
    model brings them back: then those that are kept are there twice.
    """

    fresh: int
    kept: int


@dataclass(frozen=True)
class Return:
    """The model returns to `generate`."""


@dataclass(frozen=True)
class Route:
    """Tokens come to experts that can be fetched one by one.

    Attributes:
        position: of the experts in the unit.
        choice: which they go to.
        nbytes: bytes of the tokens.
    """

    position: int
    choice: Choice
    nbytes: int = 0


@dataclass(frozen=True)
class Routed:
    """The experts are done."""


Event = Allocate | Free | Scratch | Enter | Leave | Operation | Call | Return | Route | Routed


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
