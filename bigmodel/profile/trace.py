"""The life of every activation in one forward, as a list of events, and the peak it makes on each device.

A trace does not know devices: it says which unit of the model was running when a storage came to life. Peaks for
any device map are then computed from the one trace, with the copies of inputs that cross from device to device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..devices import HOST
from .work import Work

OUTSIDE = -1
"""The unit index of what runs between units."""

D = TypeVar("D", bound=Hashable)
Rounding = Callable[[int], int]
"""How many bytes an allocator takes for so many bytes."""


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


Event = Allocate | Free | Scratch | Enter | Leave | Operation | Call | Return


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

    def replay(
        self, runs_on: Mapping[int, D], main: D, rounding: Rounding = int, brought_to: D | None = None
    ) -> Ledger[D]:
        """Return the books after this forward on the given devices.

        Args:
            runs_on: device of each unit.
            main: where the inputs are, and where runs what is between units, unless what it reads says otherwise.
            rounding: what the allocator makes of a number of bytes.
            brought_to: where the model's first weights lie, and `generate` brings the inputs; None: `main`.
        """
        ledger = Ledger(runs_on, main, rounding, brought_to)
        for held in self.initial:
            ledger.hold(held)
        for event in self.events:
            ledger.book(event)
        return ledger


class Ledger(Generic[D]):
    """Bytes alive on each device, `now` and at the highest mark, `peak`."""

    def __init__(
        self, runs_on: Mapping[int, D], main: D, rounding: Rounding = int, brought_to: D | None = None
    ) -> None:
        self.now: dict[D, int] = {}
        self.peak: dict[D, int] = {}
        self._runs_on = runs_on
        self._main = main
        self._rounding = rounding
        self._brought_to = main if brought_to is None else brought_to
        self._calls: list[Call] = []
        self._alive: dict[int, tuple[D, int]] = {}
        self._running: list[tuple[D, int]] = []  # device of each unit, bytes of inputs copied to it

    def hold(self, held: Held) -> None:
        """Book a storage that is alive from the start."""
        self._take(held.storage, self._runs_on.get(held.unit, self._main), self._rounding(held.nbytes))

    def book(self, event: Event) -> None:
        """Book one event."""
        if isinstance(event, Allocate):
            self._take(event.storage, self._place(event), self._rounding(event.nbytes))
        elif isinstance(event, Free):
            device, nbytes = self._alive.pop(event.storage, (self._main, 0))
            self._add(device, -nbytes)
        elif isinstance(event, Scratch):
            device = self._running[-1][0] if self._running else self._main
            self._add(device, event.nbytes)
            self._add(device, -event.nbytes)
        elif isinstance(event, Enter):
            self._enter(event)
        elif isinstance(event, Leave):
            self._leave(event)
        elif isinstance(event, Call):
            self._calls.append(event)
            self._bring(event, 1)
        elif isinstance(event, Return):
            self._bring(self._calls.pop(), -1)

    def _bring(self, call: Call, times: int) -> None:
        if self._brought_to != self._main:
            self._add(self._brought_to, times * self._rounding(call.fresh + call.kept))
            self._add(self._main, times * self._rounding(call.kept))

    def _place(self, event: Allocate) -> D:
        if self._running:
            return self._running[-1][0]
        return self._alive.get(event.source, (self._main, 0))[0]

    def _enter(self, event: Enter) -> None:
        device = self._runs_on.get(event.unit, self._main)
        copied = 0
        for storage, nbytes in event.inputs:
            if storage in self._alive and self._alive[storage][0] != device:
                copied += self._rounding(nbytes)
        self._running.append((device, copied))
        self._add(device, copied)

    def _leave(self, event: Leave) -> None:
        device, copied = self._running.pop()
        if device == HOST and device != self._main:
            self._hand_over(event, device)
        self._add(device, -copied)

    def _hand_over(self, event: Leave, device: D) -> None:
        """What a unit computed on the host beside an accelerator goes to the main device at once."""
        for storage, nbytes in event.outputs:
            if self._alive.get(storage, (None, 0))[0] == device:
                taken = self._alive[storage][1]
                self._take(storage, self._main, self._rounding(nbytes))
                self._add(device, -taken)

    def _take(self, storage: int, device: D, nbytes: int) -> None:
        self._alive[storage] = (device, nbytes)
        self._add(device, nbytes)

    def _add(self, device: D, nbytes: int) -> None:
        total = self.now[device] = self.now.get(device, 0) + nbytes
        if total > self.peak.get(device, 0):
            self.peak[device] = total
