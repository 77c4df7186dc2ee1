"""Replays a trace under a device map: the device of each storage, and the peak bytes on each device.

Tensors are copied between devices as in the dispatched model: inputs to the execution device of a unit, and the outputs
that a `Leave` names to the main device, or to that of a method's inputs. Calls of cached experts take the bytes of the
worst routing (`expert_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...limits import MOST_GROUPS
from .events import (
    Allocate,
    Burst,
    Call,
    EndOfUse,
    Enter,
    Event,
    Free,
    Leave,
    OutsideUse,
    Return,
    Route,
    Routed,
    RoutedCall,
    Scratch,
)
from .expert_calls import BY_ROWS, NUMBER, ExpertCall, expert_calls, host_call, split_call
from .trace import InitialStorage, Trace

D = TypeVar("D", bound=Hashable)
Rounding = Callable[[int], int]
"""Bytes requested -> bytes that the allocator takes."""

Watch = Callable[[D, int, int | None], None]
"""Called with the device, the bytes that are taken there (negative: given back), and the storage, if it is one."""


def replay(
    trace: Trace,
    execution_devices: Mapping[int, D],
    main: D,
    rounding: Mapping[D, Rounding] | None = None,
    input_device: D | None = None,
    experts: Mapping[tuple[int, int], int] | None = None,
    offloaded: Mapping[int, D] | None = None,
    split: tuple[int, D] | None = None,
    watch: Watch[D] | None = None,
) -> Ledger[D]:
    """Return the ledger after a forward on the given devices.

    Args:
        trace: the forward.
        execution_devices: device that each unit executes on, by unit index; others execute on `main`.
        main: device of the inputs; also of operations between units, unless their inputs lie elsewhere.
        rounding: bytes that the allocator of a device takes for a number of bytes; others take them as they are.
        input_device: device of the model's first weights, to which `generate` moves the inputs; None: `main`.
        experts: slots of each cache of experts, by (unit, position of the experts in it).
        offloaded: device whose memory holds the weights of each unit that has them elsewhere than where it runs.
        split: calls of cached experts with fewer tokens than this are computed in part on this device; None: none are.
        watch: told of every number of bytes that is taken or given back after the start.
    """
    ledger = Ledger(execution_devices, main, rounding, input_device, experts, offloaded, split)
    for held in trace.initial:
        ledger.start_with(held)
    ledger.watch = watch
    for event in trace.events if rounding or watch is not None else trace.condensed:
        ledger.apply(event)
    return ledger


@dataclass
class _MovedInputs(Generic[D]):
    """The inputs of a running call.

    Attributes:
        call: the call.
        kept: of those that `generate` keeps and that are copied for the call: the storage, the bytes of the tensor, and
            the device and bytes of its storage.
    """

    call: Call
    kept: list[tuple[int, int, D, int]] = field(default_factory=list)


class Ledger(Generic[D]):
    """Bytes alive on each device: `now`, and their maximum, `peak`.

    Attributes:
        watch: as for `replay`.
    """

    def __init__(
        self,
        execution_devices: Mapping[int, D],
        main: D,
        rounding: Mapping[D, Rounding] | None = None,
        input_device: D | None = None,
        experts: Mapping[tuple[int, int], int] | None = None,
        offloaded: Mapping[int, D] | None = None,
        split: tuple[int, D] | None = None,
    ) -> None:
        self.now: dict[D, int] = {}
        self.peak: dict[D, int] = {}
        self._execution_devices = execution_devices
        self._main = main
        self._last = main  # device of the last unit, within a call of the model
        self._rounding = rounding or {}
        self.watch: Watch[D] | None = None
        self._experts = experts or {}
        self._offloaded = offloaded or {}
        self._split = split
        self._routed: tuple[Route, int, list[Event]] | None = None  # the running call of cached experts, and its slots
        self._indices: list[int] = []  # bytes of the slot indices that the running experts are called with
        self._input_device = main if input_device is None else input_device
        self._calls: list[_MovedInputs[D]] = []
        self._used: tuple[D, list[int]] = main, []  # where a running function computes, and its copies of weights
        self._alive: dict[int, tuple[D, int]] = {}
        self._beside: set[int] = set()  # storages that were brought to weights in host memory, or made of such ones
        self._guessed: dict[int, int] = {}  # by storage that may lie on the main device instead: its bytes there
        self._sharing: dict[int, list[int]] = {}  # by storage: those that are the same memory, of which one is counted
        self._running: list[tuple[int, D, dict[int, int]]] = []  # each running unit: index, device, inputs copied there

    def start_with(self, held: InitialStorage) -> None:
        """Count a storage that is alive from the start."""
        device = self._execution_devices.get(held.unit, self._main)
        self._take(held.storage, device, self._taken(device, held.nbytes))

    def apply(self, event: Event) -> None:
        """Apply one event."""
        if self._routed is not None and not isinstance(event, Routed):
            self._routed[2].append(event)
        elif isinstance(event, Allocate):
            if self._running and event.brought_to is event.view_of is None and not (event.others or event.weights):
                device = self._running[-1][1]
                self._take(event.storage, device, self._taken(device, event.nbytes))
            else:
                self._allocate(event)
        elif isinstance(event, Free):
            self._free(event.storage)
        elif isinstance(event, Burst):
            self._burst(self._running[-1][1], event.peak, event.net)
        elif isinstance(event, Scratch):
            device = self._running[-1][1] if self._running else self._main
            self._add(device, self._taken(device, event.nbytes))
            self._add(device, -self._taken(device, event.nbytes))
        elif isinstance(event, OutsideUse):
            self._use_outside(event)
        elif isinstance(event, EndOfUse):
            self._drop(*self._used)
        elif isinstance(event, Enter):
            self._enter(event)
        elif isinstance(event, Leave):
            self._leave(event)
        elif isinstance(event, Route):
            self._route(event)
        elif isinstance(event, Routed):
            self._end_routed()
        elif isinstance(event, RoutedCall):
            self._route(event.route)
            for each in event.condensed:
                self.apply(each)
            self._end_routed(event)
        elif isinstance(event, Call):
            self._last = self._main
            self._move_inputs(event)
        elif isinstance(event, Return):
            self._return(event)
            self._release_inputs(self._calls.pop())
            self._last = self._main

    def _move_inputs(self, call: Call) -> None:
        moved: _MovedInputs[D] = _MovedInputs(call)
        if self._input_device != self._main:
            self._copy(self._input_device, [nbytes for _, nbytes in call.fresh])
        for storage, nbytes in call.kept:
            lies_on, taken = self._alive.get(storage, (self._main, 0))
            if lies_on != self._main or self._input_device != self._main:
                moved.kept.append((storage, nbytes, lies_on, taken))
                self._copy(self._main, [nbytes])
                if self._input_device != self._main:
                    self._copy(self._input_device, [nbytes])
                self._alive[storage] = self._main, self._taken(self._main, nbytes)
        self._calls.append(moved)

    def _release_inputs(self, moved: _MovedInputs[D]) -> None:
        for storage, nbytes, lies_on, taken in moved.kept:
            if self._input_device != self._main:
                self._drop(self._input_device, [nbytes])
            if storage in self._alive:
                self._drop(self._main, [nbytes])
                self._alive[storage] = lies_on, taken
            else:  # the call has freed the copy, and the tensor with it
                self._add(lies_on, -taken)
        if self._input_device != self._main:
            for storage, nbytes in moved.call.fresh:
                self._drop(self._input_device, [nbytes])
                self._move(storage, nbytes, self._input_device)

    def _return(self, event: Return) -> None:
        for storage, nbytes in event.outputs:
            if storage not in event.given:
                self._move(storage, nbytes, self._input_device)
            elif self._alive.get(storage, (self._input_device, 0))[0] != self._input_device:
                self._copy(self._input_device, [nbytes])
                self._drop(self._input_device, [nbytes])

    def _free(self, storage: int) -> None:
        device, nbytes = self._alive.pop(storage, (self._main, 0))
        self._add(device, -nbytes, storage)
        if storage in self._guessed:
            self._add(self._main, -self._guessed.pop(storage))
        self._beside.discard(storage)
        sharing = self._sharing.pop(storage, None)
        if sharing:
            sharing.remove(storage)
        if sharing and nbytes:
            self._take(sharing[0], device, nbytes)

    def _bring(self, event: Allocate, unit: int) -> None:
        """Copy the source of `event` to the device of a unit's weights; where it lies there, it is shared."""
        device = self._held_on(unit)
        if self._alive.get(event.source, (device, 0))[0] != device:
            self._take(event.storage, device, self._taken(device, event.nbytes))
            if unit in self._offloaded:
                self._beside.add(event.storage)
            return
        self._take(event.storage, device, 0)
        sharing = self._sharing.setdefault(event.source, [event.source])
        sharing.append(event.storage)
        self._sharing[event.storage] = sharing

    def _allocate(self, event: Allocate) -> None:
        if event.brought_to is not None:
            self._bring(event, event.brought_to)
            return
        if event.view_of is not None:
            self._view(event, event.view_of)
            return
        device = self._device_of_weights(event.weights) if event.weights else self._device_of(event.source)
        elsewhere = [nbytes for storage, nbytes in event.others if self._alive.get(storage, (device, 0))[0] != device]
        self._copy(device, elsewhere)
        self._take(event.storage, device, self._taken(device, event.nbytes))
        self._drop(device, elsewhere)
        if device != self._main and not event.weights and (self._is_beside(event) or self._is_guessed(event)):
            self._guessed[event.storage] = self._taken(self._main, event.nbytes)
            self._add(self._main, self._guessed[event.storage])

    def _view(self, event: Allocate, unit: int) -> None:
        """Count a view of a unit's weight: nothing where the weight lies. A unit that was brought its weights for a
        forward returns a copy."""
        if not self._running:
            self._take(event.storage, self._held_on(unit), 0)
            return
        device = self._running[-1][1]
        self._take(event.storage, device, self._taken(device, event.nbytes) if unit in self._offloaded else 0)

    def _is_beside(self, event: Allocate) -> bool:
        """Return whether a storage is made between units of what was brought to a weight in host memory. A module
        around the units that come next takes it to the main device, so it counts there, too."""
        if self._running or event.source not in self._beside:
            return False
        self._beside.add(event.storage)
        return True

    def _is_guessed(self, event: Allocate) -> bool:
        """Return whether nothing tells the device of a storage: it is made between units, of nothing that is alive, or
        of such storages alone. Code makes positions where the last output is, or where an input is: both count them.
        """
        if self._running:
            return False
        read = [storage for storage in (event.source, *dict(event.others)) if storage in self._alive]
        return all(storage in self._guessed for storage in read)

    def _device_of(self, source: int) -> D:
        """Return the device of an operation: the running unit's; between units that of the storage `source`."""
        if self._running:
            return self._running[-1][1]
        return self._alive.get(source, (self._last, 0))[0]

    def _device_of_weights(self, units: tuple[int, ...]) -> D:
        """Return the device of an operation between units that reads weights of `units` alone."""
        return self._held_on(next((unit for unit in units if unit not in self._offloaded), units[0]))

    def _use_outside(self, event: OutsideUse) -> None:
        device = self._device_of_weights(event.alone) if event.alone else self._device_of(event.source)
        held = ((self._held_on(unit), nbytes) for unit, nbytes in event.weights)
        copied = [nbytes for other, nbytes in held if other != device]
        self._copy(device, copied)
        if event.lasts:
            self._used = device, copied
        else:
            self._drop(device, copied)

    def _held_on(self, unit: int) -> D:
        """Return the device whose memory holds the weights of a unit."""
        return self._offloaded.get(unit, self._execution_devices.get(unit, self._main))

    def _enter(self, event: Enter) -> None:
        device = self._execution_devices.get(event.unit, self._main)
        copied = {storage: nbytes for storage, nbytes in event.inputs if not self._lies_on(device, storage)}
        self._running.append((event.unit, device, copied))
        self._copy(device, copied.values())

    def _lies_on(self, device: D, storage: int) -> bool:
        """Return whether a storage is counted on a device, or is not followed."""
        return self._alive.get(storage, (device, 0))[0] == device or (device == self._main and storage in self._guessed)

    def _route(self, event: Route) -> None:
        """Begin a call of cached experts.

        If all experts fit, the call takes the recorded bytes, the slot indices, and the row counts of the slots beyond
        the number of experts.
        """
        if not self._running:
            return
        unit, device, _ = self._running[-1]
        slots = self._experts.get((unit, event.position))
        if slots is None:
            return
        if slots < event.choice.count or slots > MOST_GROUPS or self._is_split(event):
            self._routed = event, slots, []
            return
        counted = NUMBER * (slots - event.choice.count) if event.counts_rows else 0
        self._indices = [event.choice.rows * NUMBER, counted]
        self._copy(device, self._indices)

    def _is_split(self, route: Route) -> bool:
        return self._split is not None and route.choice.tokens < self._split[0] and route.implementation in BY_ROWS

    def _end_routed(self, condensed: RoutedCall | None = None) -> None:
        """End a call of cached experts: add its worst peak, then the storages that it leaves alive."""
        if not self._running:
            return
        device = self._running[-1][1]
        self._drop(device, self._indices)
        self._indices = []
        if self._routed is None:
            return
        route, slots, events = self._routed
        self._routed = None
        if condensed is None:
            self._add_calls(route, slots, device, events)
        else:
            self._add_peaks(condensed, slots, device)
        made = {event.storage: event.nbytes for event in events if isinstance(event, Allocate)}
        for event in events:
            if isinstance(event, Free) and made.pop(event.storage, None) is None and event.storage in self._alive:
                held_on, nbytes = self._alive.pop(event.storage)
                self._add(held_on, -nbytes, event.storage)
        for storage, nbytes in made.items():
            self._take(storage, device, self._taken(device, nbytes))

    def _add_calls(self, route: Route, slots: int, device: D, events: Sequence[Event]) -> None:
        """Add the bytes of the worst way in which experts may be called, one after another."""
        rounding = self._rounding.get(device, int)
        calls = expert_calls(route, slots)
        if self._split is not None and self._is_split(route):
            calls.append(split_call(route, slots))
            host = self._split[1]
            for nbytes in host_call(route).changes(route, events, self._rounding.get(host, int)):
                self._add(host, nbytes)
        worst = max(calls, key=lambda call: call.peak(route, events, rounding))
        for nbytes in worst.changes(route, events, rounding):
            self._add(device, nbytes)

    def _add_peaks(self, condensed: RoutedCall, slots: int, device: D) -> None:
        """As `_add_calls`, without rounding: only peaks matter, which are the same in all layers of one kind."""

        def peak(call: ExpertCall) -> int:
            if call not in condensed.peaks:
                condensed.peaks[call] = call.peak(condensed.route, condensed.events, int)
            return condensed.peaks[call]

        calls = expert_calls(condensed.route, slots)
        if self._split is not None and self._is_split(condensed.route):
            calls.append(split_call(condensed.route, slots))
            self._burst(self._split[1], peak(host_call(condensed.route)))
        self._burst(device, max(map(peak, calls)))

    def _leave(self, event: Leave) -> None:
        _, device, copied = self._running.pop()
        to = self._main if event.source is None else self._alive.get(event.source, (self._main, 0))[0]
        if self._calls:
            self._last = to if event.outputs else device
        for storage, nbytes in event.outputs:
            held_on, taken = self._alive.get(storage, (None, 0))
            if held_on == device:
                self._move(storage, nbytes, to)
            elif storage in copied and held_on == to:  # an input's copy comes back, beside the input
                again = self._taken(to, nbytes)
                self._alive[storage] = to, taken + again
                self._add(to, again, storage)
        self._drop(device, copied.values())

    def _move(self, storage: int, nbytes: int, to: D) -> None:
        """Replace a storage on another device by a copy of `nbytes` on `to`."""
        device, taken = self._alive.get(storage, (to, 0))
        if device != to:
            self._add(self._main, -self._guessed.pop(storage, 0))
            self._take(storage, to, self._taken(to, nbytes))
            self._add(device, -taken, storage)

    def _take(self, storage: int, device: D, nbytes: int) -> None:
        self._alive[storage] = (device, nbytes)
        self._add(device, nbytes, storage)

    def _copy(self, device: D, tensors: Iterable[int]) -> None:
        """Add tensors of so many bytes each to a device."""
        for nbytes in tensors:
            self._add(device, self._taken(device, nbytes))

    def _drop(self, device: D, tensors: Iterable[int]) -> None:
        """Remove what `_copy` has added."""
        for nbytes in tensors:
            self._add(device, -self._taken(device, nbytes))

    def _taken(self, device: D, nbytes: int) -> int:
        """Return the bytes that the allocator of a device takes for a tensor."""
        rounding = self._rounding.get(device)
        return nbytes if rounding is None else rounding(nbytes)

    def _burst(self, device: D, peak: int, net: int = 0) -> None:
        """Add `peak` bytes, of which `net` remain."""
        self._add(device, peak)
        self._add(device, net - peak)

    def _add(self, device: D, nbytes: int, storage: int | None = None) -> None:
        total = self.now[device] = self.now.get(device, 0) + nbytes
        if total > self.peak.get(device, 0):
            self.peak[device] = total
        if self.watch is not None and nbytes:
            self.watch(device, nbytes, storage)
