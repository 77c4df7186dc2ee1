"""Keeps the books of a trace: which device each storage lies on, and the most bytes there at once.

What experts take that are computed with some after others, because there is not room for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...devices import HOST
from .trace import Allocate, Burst, Call, Enter, Event, Free, Held, Leave, Return, Route, Routed, Scratch, Trace

D = TypeVar("D", bound=Hashable)
Rounding = Callable[[int], int]
"""How many bytes an allocator takes for so many bytes."""

NUMBER = 8
"""Bytes of the number of an expert; of what is counted of one, as two numbers of 4."""


def replay(
    trace: Trace,
    runs_on: Mapping[int, D],
    main: D,
    rounding: Rounding = int,
    brought_to: D | None = None,
    experts: Mapping[tuple[int, int], int] | None = None,
) -> Ledger[D]:
    """Return the books after a forward on the given devices.

    Args:
        trace: the forward.
        runs_on: device of each unit.
        main: where the inputs are, and where runs what is between units, unless what it reads says otherwise.
        rounding: what the allocator makes of a number of bytes.
        brought_to: where the model's first weights lie, and `generate` brings the inputs; None: `main`.
        experts: for how many experts there is room, where they come one by one: by unit and their position in it.
    """
    ledger = Ledger(runs_on, main, rounding, brought_to, experts or {})
    for held in trace.initial:
        ledger.hold(held)
    for event in trace.condensed if rounding is int else trace.events:
        ledger.book(event)
    return ledger


class Ledger(Generic[D]):
    """Bytes alive on each device, `now` and at the highest mark, `peak`."""

    def __init__(
        self,
        runs_on: Mapping[int, D],
        main: D,
        rounding: Rounding = int,
        brought_to: D | None = None,
        experts: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        self.now: dict[D, int] = {}
        self.peak: dict[D, int] = {}
        self._runs_on = runs_on
        self._main = main
        self._last = main  # where the unit before lies, in a call of the model
        self._rounding = rounding
        self._experts = experts or {}
        self._in_parts, self._in_device = ALL_AT_ONCE, main
        self._brought_to = main if brought_to is None else brought_to
        self._calls: list[Call] = []
        self._alive: dict[int, tuple[D, int]] = {}
        self._running: list[tuple[int, D, int]] = []  # each unit, its device, bytes copied to it while it runs

    def hold(self, held: Held) -> None:
        """Book a storage that is alive from the start."""
        self._take(held.storage, self._runs_on.get(held.unit, self._main), self._rounding(held.nbytes))

    def book(self, event: Event) -> None:
        """Book one event."""
        if isinstance(event, Allocate):
            self._allocate(event)
        elif isinstance(event, Free):
            device, nbytes = self._alive.pop(event.storage, (self._main, 0))
            self._add(device, -nbytes)
        elif isinstance(event, Burst):
            device = self._running[-1][1]
            self._add(device, event.peak)
            self._add(device, event.net - event.peak)
        elif isinstance(event, Scratch):
            device = self._running[-1][1] if self._running else self._main
            self._add(device, event.nbytes)
            self._add(device, -event.nbytes)
        elif isinstance(event, Enter):
            self._enter(event)
        elif isinstance(event, Leave):
            self._leave(event)
        elif isinstance(event, Route):
            self._route(event)
        elif isinstance(event, Routed):
            self._add(self._in_device, -self._in_parts.beside)
            self._in_parts = ALL_AT_ONCE
        elif isinstance(event, Call):
            self._last = self._main
            self._calls.append(event)
            self._bring(event)
        elif isinstance(event, Return):
            self._return(event)
            self._let_go(self._calls.pop())
            self._last = self._main

    def _bring(self, call: Call) -> None:
        if self._brought_to != self._main:
            self._add(self._brought_to, sum(self._rounding(nbytes) for _, nbytes in call.fresh))
            self._add(self._brought_to, self._rounding(call.kept))
            self._add(self._main, self._rounding(call.kept))

    def _let_go(self, call: Call) -> None:
        if self._brought_to != self._main:
            self._add(self._brought_to, -self._rounding(call.kept))
            self._add(self._main, -self._rounding(call.kept))
            for storage, nbytes in call.fresh:
                self._add(self._brought_to, -self._rounding(nbytes))
                self._move(storage, nbytes, self._brought_to)

    def _return(self, event: Return) -> None:
        for storage, nbytes in event.outputs:
            if storage not in event.given:
                self._move(storage, nbytes, self._brought_to)
            elif self._alive.get(storage, (self._brought_to, 0))[0] != self._brought_to:
                self._add(self._brought_to, self._rounding(nbytes))
                self._add(self._brought_to, -self._rounding(nbytes))

    def _allocate(self, event: Allocate) -> None:
        device = self._place(event)
        elsewhere = [nbytes for storage, nbytes in event.others if self._alive.get(storage, (device, 0))[0] != device]
        copied = sum(map(self._rounding, elsewhere))
        self._add(device, copied)
        self._take(event.storage, device, self._rounding(self._in_parts.bytes_of(event.nbytes)))
        self._add(device, -copied)

    def _place(self, event: Allocate) -> D:
        if self._running:
            return self._running[-1][1]
        return self._alive.get(event.source, (self._last, 0))[0]

    def _enter(self, event: Enter) -> None:
        device = self._runs_on.get(event.unit, self._main)
        copied = 0
        for storage, nbytes in event.inputs:
            if storage in self._alive and self._alive[storage][0] != device:
                copied += self._rounding(nbytes)
        self._running.append((event.unit, device, copied))
        self._add(device, copied)

    def _route(self, event: Route) -> None:
        """Experts that come one by one are called by the numbers of their slots, which are copied to the device; and
        there are as many experts to count the tokens of as slots, if they are counted."""
        if not self._running:
            return
        unit, device, copied = self._running.pop()
        slots = self._experts.get((unit, event.position))
        more = 0
        if slots is not None:
            choice = event.choice
            counted = NUMBER * max(slots - choice.count, 0) if event.counted else 0
            more = self._rounding(choice.tokens * choice.per_token * NUMBER) + counted
            self._in_parts, self._in_device = in_parts(event, slots), device
            self._add(device, self._in_parts.beside)
        self._running.append((unit, device, copied + more))
        self._add(device, more)

    def _leave(self, event: Leave) -> None:
        _, device, copied = self._running.pop()
        if self._calls:
            self._last = self._main if device == HOST else device
        if device == HOST and device != self._main:
            self._hand_over(event, device)
        self._add(device, -copied)

    def _hand_over(self, event: Leave, device: D) -> None:
        """What a unit computed on the host beside an accelerator goes to the main device at once."""
        for storage, nbytes in event.outputs:
            if self._alive.get(storage, (None, 0))[0] == device:
                self._move(storage, nbytes, self._main)

    def _move(self, storage: int, nbytes: int, to: D) -> None:
        """Book that a copy of `nbytes` takes the place of a storage that lies elsewhere."""
        device, taken = self._alive.get(storage, (to, 0))
        if device != to:
            self._take(storage, to, self._rounding(nbytes))
            self._add(device, -taken)

    def _take(self, storage: int, device: D, nbytes: int) -> None:
        self._alive[storage] = (device, nbytes)
        self._add(device, nbytes)

    def _add(self, device: D, nbytes: int) -> None:
        total = self.now[device] = self.now.get(device, 0) + nbytes
        if total > self.peak.get(device, 0):
            self.peak[device] = total


@dataclass(frozen=True)
class InParts:
    """How a mixture's experts are computed with that do not all fit the device: some after others.

    Attributes:
        share: how much of the choices is computed at once.
        least: bytes of what is made whole all the same, and of anything smaller.
        beside: bytes of what each choice comes to, until all have, and of the tokens of a part.
    """

    share: float
    least: int
    beside: int

    def bytes_of(self, nbytes: int) -> int:
        """Return the bytes that something takes which takes `nbytes` where all is computed at once."""
        return nbytes if nbytes <= self.least else int(nbytes * self.share)


ALL_AT_ONCE = InParts(1.0, 0, 0)


def in_parts(route: Route, slots: int) -> InParts:
    """Return how experts are computed with where there is room for `slots` of them: half that many at once, while the
    others arrive."""
    if slots >= route.choice.wanted:
        return ALL_AT_ONCE
    share = min(1.0, max(1, slots // 2) / route.choice.wanted)
    return InParts(share, route.nbytes, int(route.nbytes * route.choice.per_token * (1 + share)))
