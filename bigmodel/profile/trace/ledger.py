"""Replays a trace under a device map: which device each storage lies on, and the peak bytes on each device.

Tensors that cross between devices are copied, as the dispatched model copies them: inputs to where a unit executes,
outputs back to the main device. Experts that do not all fit a device are computed in chunks (`chunk_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...devices import HOST
from .trace import (
    Allocate,
    Burst,
    Call,
    Enter,
    Event,
    Free,
    InitialStorage,
    Leave,
    Return,
    Route,
    Routed,
    Scratch,
    Trace,
)

D = TypeVar("D", bound=Hashable)
Rounding = Callable[[int], int]
"""Bytes requested -> bytes that the allocator takes."""

NUMBER = 8
"""Bytes of one expert index (int64), and of the token counts of one expert (two int32)."""


def replay(
    trace: Trace,
    execution_devices: Mapping[int, D],
    main: D,
    rounding: Rounding = int,
    input_device: D | None = None,
    experts: Mapping[tuple[int, int], int] | None = None,
) -> Ledger[D]:
    """Return the ledger after a forward on the given devices.

    Args:
        trace: the forward.
        execution_devices: device that each unit executes on, by unit index; others execute on `main`.
        main: device of the inputs; also of operations between units, unless their inputs lie elsewhere.
        rounding: bytes that the allocator takes for a number of bytes.
        input_device: device of the model's first weights, to which `generate` moves the inputs; None: `main`.
        experts: slots of each cache of experts, by (unit, position of the experts in it).
    """
    ledger = Ledger(execution_devices, main, rounding, input_device, experts or {})
    for held in trace.initial:
        ledger.hold(held)
    for event in trace.condensed if rounding is int else trace.events:
        ledger.book(event)
    return ledger


class Ledger(Generic[D]):
    """Bytes alive on each device: `now`, and at most, `peak`."""

    def __init__(
        self,
        execution_devices: Mapping[int, D],
        main: D,
        rounding: Rounding = int,
        input_device: D | None = None,
        experts: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        self.now: dict[D, int] = {}
        self.peak: dict[D, int] = {}
        self._execution_devices = execution_devices
        self._main = main
        self._last = main  # device of the last unit, within a call of the model
        self._rounding = rounding
        self._experts = experts or {}
        self._chunked, self._chunked_on = UNCHUNKED, main
        self._brought_to = main if input_device is None else input_device
        self._calls: list[Call] = []
        self._alive: dict[int, tuple[D, int]] = {}
        self._running: list[tuple[int, D, int]] = []  # each running unit: index, device, bytes copied there for it

    def hold(self, held: InitialStorage) -> None:
        """Count a storage that is alive from the start."""
        self._take(held.storage, self._execution_devices.get(held.unit, self._main), self._rounding(held.nbytes))

    def book(self, event: Event) -> None:
        """Apply one event."""
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
            self._add(self._chunked_on, -self._chunked.beside)
            self._chunked = UNCHUNKED
        elif isinstance(event, Call):
            self._last = self._main
            self._calls.append(event)
            self._move_inputs(event)
        elif isinstance(event, Return):
            self._return(event)
            self._release_inputs(self._calls.pop())
            self._last = self._main

    def _move_inputs(self, call: Call) -> None:
        if self._brought_to != self._main:
            self._add(self._brought_to, sum(self._rounding(nbytes) for _, nbytes in call.fresh))
            self._add(self._brought_to, self._rounding(call.kept))
            self._add(self._main, self._rounding(call.kept))

    def _release_inputs(self, call: Call) -> None:
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
        device = self._device_of(event)
        elsewhere = [nbytes for storage, nbytes in event.others if self._alive.get(storage, (device, 0))[0] != device]
        copied = sum(map(self._rounding, elsewhere))
        self._add(device, copied)
        self._take(event.storage, device, self._rounding(self._chunked.bytes_of(event.nbytes)))
        self._add(device, -copied)

    def _device_of(self, event: Allocate) -> D:
        if self._running:
            return self._running[-1][1]
        return self._alive.get(event.source, (self._last, 0))[0]

    def _enter(self, event: Enter) -> None:
        device = self._execution_devices.get(event.unit, self._main)
        copied = 0
        for storage, nbytes in event.inputs:
            if storage in self._alive and self._alive[storage][0] != device:
                copied += self._rounding(nbytes)
        self._running.append((event.unit, device, copied))
        self._add(device, copied)

    def _route(self, event: Route) -> None:
        """Count what calling cached experts takes beside the experts: slot indices on the device, and token counts of
        the slots beyond the number of experts."""
        if not self._running:
            return
        unit, device, copied = self._running.pop()
        slots = self._experts.get((unit, event.position))
        more = 0
        if slots is not None:
            choice = event.choice
            counted = NUMBER * max(slots - choice.count, 0) if event.counted else 0
            more = self._rounding(choice.tokens * choice.per_token * NUMBER) + counted
            self._chunked, self._chunked_on = chunk_experts(event, slots), device
            self._add(device, self._chunked.beside)
        self._running.append((unit, device, copied + more))
        self._add(device, more)

    def _leave(self, event: Leave) -> None:
        _, device, copied = self._running.pop()
        if self._calls:
            self._last = self._main if device == HOST else device
        if device == HOST and device != self._main:
            self._move_outputs(event, device)
        self._add(device, -copied)

    def _move_outputs(self, event: Leave, device: D) -> None:
        """Move the outputs of a unit that executes on the host to the main device, as dispatch does at once."""
        for storage, nbytes in event.outputs:
            if self._alive.get(storage, (None, 0))[0] == device:
                self._move(storage, nbytes, self._main)

    def _move(self, storage: int, nbytes: int, to: D) -> None:
        """Replace a storage that lies elsewhere by a copy of `nbytes` on `to`."""
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
class ChunkedExperts:
    """Memory of experts that are computed in chunks, because the device has no room for all that a call wants.

    Attributes:
        share: share of the routed tokens in one chunk.
        least: tensors of at most so many bytes are made whole, not by chunk.
        beside: bytes held over all chunks: the outputs collected so far, and the tokens of one chunk.
    """

    share: float
    least: int
    beside: int

    def bytes_of(self, nbytes: int) -> int:
        """Return the bytes of a tensor that has `nbytes` when all experts are computed at once."""
        return nbytes if nbytes <= self.least else int(nbytes * self.share)


UNCHUNKED = ChunkedExperts(1.0, 0, 0)


def chunk_experts(route: Route, slots: int) -> ChunkedExperts:
    """Return how experts are chunked when there are `slots` for them: half of the slots compute while the other half
    is filled."""
    if slots >= route.choice.wanted:
        return UNCHUNKED
    share = min(1.0, max(1, slots // 2) / route.choice.wanted)
    return ChunkedExperts(share, route.nbytes, int(route.nbytes * route.choice.per_token * (1 + share)))
