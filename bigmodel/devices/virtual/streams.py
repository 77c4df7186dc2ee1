"""Streams and events of virtual accelerators, with the names and rules of those in ``torch.cuda``.

Copies that CUDA does behind the program's back are done later, when something that is ordered after them needs them, or
at any time before: copies from pinned memory on other streams than the default one, and copies to the host that do not
block. What reads them too early gets garbage, as it may on a GPU. How late they are is decided by the schedule.

Computation is done when it is launched, unless late computation is asked for; the race detector checks the order that
the program asks for either way. Late computation also shows what fails or takes its time after its launch. It costs a
look at the metadata of all arguments for each launch, and memory: inputs are held until they have been read.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .clock import sleep_until
from .host_copies import check_watched
from .races import Clock, Queue, detector, joined
from .schedule import MOST_DELAYED, POLLS, HostWaits, Schedule

TYPE = "virtual"

_numbers = itertools.count(1)


class _Delayed(NamedTuple):
    """Work of a stream that has not been done: an operation, a copy, a wait for an event, or the time stamp of one.

    Attributes:
        position: Its place in the stream.
        run: Does it; None: it only waits.
        for_host: Whether only the host can tell that it was done: no later work of the stream depends on it.
        after: Streams whose work up to a position comes before.
    """

    position: int
    run: Callable[[], None] | None
    for_host: bool = False
    after: tuple[tuple[Queue, int], ...] = ()

    def is_over(self) -> bool:
        """Whether it is a wait for what has been done."""
        return self.run is None and not any(other.has_delayed(position) for other, position in self.after)


class Stream:
    """A queue of work on one device, done in order.

    What only the host can tell apart, copies to its memory and waits for such copies of other streams, is not done
    before the host waits, also if later work of the stream has been.

    Args:
        device: The device; None: the current one.

    Attributes:
        ready: When its work will have been done (`time.perf_counter`), on a device of a set speed; 0 on others.
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device(TYPE, index_of(device))
        self.priority = priority
        self.number = next(_numbers)
        self.known: Clock = {}
        self.position = 0
        self.ready = 0.0
        self._delayed: deque[_Delayed] = deque()
        self._for_host: deque[_Delayed] = deque()
        self._polls = 0
        with detector.lock:
            _state.streams.add(self)

    def __repr__(self) -> str:
        return f"{'the default stream' if self.is_default else f'stream {self.number}'} of {self.device}"

    @property
    def is_default(self) -> bool:
        """Whether it is the default stream of its device."""
        return self is _state.defaults.get(self.device.index)

    def wait_event(self, event: Event) -> None:
        """Let all later work of this stream run after `event`."""
        with detector.lock:
            joined(self.known, event.clock)
            self.ready = max(self.ready, event.ready)
            recorded, position = event.stream, event.position
            if recorded is not None and recorded is not self and recorded.has_delayed(position):
                self.delay(None, after=((recorded, position),))

    def wait_stream(self, other: Stream) -> None:
        """Let all later work of this stream run after all present work of `other`."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event behind all work so far and return it."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work has been done. The device goes on while it is asked."""
        with detector.lock:
            event = self.record_event()
            event.polls = self._polls
            done = event.query()
            self._polls = 0 if done else event.polls
            return done

    def synchronize(self) -> None:
        """Block the host until all work has been done."""
        with detector.lock:
            count_wait(synchronizations=1)
            self.finish()
        sleep_until(self.ready)

    def finish(self) -> None:
        """Do all work, of which the host knows then."""
        with detector.lock:
            self.run_delayed()
            joined(detector.host, self.clock())
            check_watched()

    def clock(self) -> Clock:
        """Return what is ordered before the next launch, launches of this stream included."""
        return {**self.known, self.number: detector.time}

    def delay(
        self,
        run: Callable[[], None] | None,
        for_host: bool = False,
        after: tuple[tuple[Queue, int], ...] = (),
    ) -> None:
        """Queue work, and do it at once if the schedule says so."""
        self._queue(run, for_host, after)
        if not _state.schedule.is_late():
            self.run_delayed()

    def delay_compute(self, run: Callable[[], None]) -> None:
        """Queue an operation, and do it at once if the schedule says so, or if too much is queued."""
        self._queue(run)
        if len(self._delayed) > MOST_DELAYED or not _state.schedule.is_compute_late():
            self.run_delayed(for_host=False)

    def when_done(self, run: Callable[[], None], others: Iterable[tuple[Queue, int]] = ()) -> None:
        """Call `run` after all present work of this stream and that of `others` up to a position; now if there is none.

        Nothing else is done now: this is called while memory is freed, where no error may be raised. Copies to the host
        have read the memory already.
        """
        waits = tuple([(other, position) for other, position in others if other.has_delayed(position)])
        if waits or self._delayed or self._for_host:
            self._queue(run, False, waits)
        else:
            run()

    def _queue(
        self,
        run: Callable[[], None] | None,
        for_host: bool = False,
        after: tuple[tuple[Queue, int], ...] = (),
    ) -> None:
        self.position += 1
        self._delayed.append(_Delayed(self.position, run, for_host, after))
        _state.busy.add(self)

    def has_delayed(self, position: int | None = None) -> bool:
        """Whether any work up to `position` has not been done."""
        queue = self._for_host or self._delayed
        return bool(queue) and (position is None or queue[0].position <= position)

    def run_delayed(self, position: int | None = None, for_host: bool = True) -> None:
        """Do the work up to `position` (None: all); without `for_host`, leave what only the host can tell apart."""
        while True:
            queue = self._for_host if for_host and self._for_host else self._delayed
            if not queue or (position is not None and queue[0].position > position):
                break
            first = queue.popleft()
            for other, awaited in first.after:
                # Work that is not a wait itself comes after others without telling the host anything of them.
                other.run_delayed(awaited, for_host and first.run is None)
            if not for_host and (first.for_host or not (first.run is not None or first.is_over())):
                self._leave_for_host(first)
            elif first.run is not None:
                first.run()
        if not (self._delayed or self._for_host):
            _state.busy.discard(self)

    def catch_up(self) -> None:
        """Do all queued work before a launch that is done at once, except work whose delay only the host notices."""
        with detector.lock:
            self.run_delayed(for_host=False)

    def _leave_for_host(self, work: _Delayed) -> None:
        while self._for_host and self._for_host[0].is_over():
            self._for_host.popleft()
        self._for_host.append(work)


class Event:
    """A point in the work of a stream.

    Args:
        enable_timing: Whether `elapsed_time` may be asked.
        blocking: Whether a host that waits for it sleeps, as on CUDA; for others it spins.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed = enable_timing
        self.blocking = blocking
        self.stream: Stream | None = None
        self.position = 0
        self.clock: Clock = {}
        self.polls = 0
        self.ready = 0.0
        self._passed: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the present end of `stream`; None: the calling thread's current one."""
        with detector.lock:
            stream = stream or current_stream()
            self.ready = stream.ready
            self.stream, self.clock, self.polls, self._passed = stream, stream.clock(), 0, None
            if not self.timed or not stream.has_delayed():
                self.position, self._passed = stream.position, max(time.perf_counter(), self.ready)
            else:
                self.position = stream.position + 1
                stream.delay(self._pass)

    def wait(self, stream: Stream | None = None) -> None:
        """Let all later work of `stream` (None: the current one) run after this event."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether the work before it has been done. The device goes on while it is asked."""
        if self.stream is None:
            return True
        if self.ready > time.perf_counter():
            return False
        with detector.lock:
            passed = self.has_passed()
            if passed:
                self._finish()
            return passed

    def has_passed(self) -> bool:
        """Do what `query` does for the allocator: the program learns nothing from its answer, so no order follows."""
        assert self.stream is not None
        with detector.lock:
            self.polls += 1
            waiting = self.polls <= POLLS and _state.strict and not self._host_knows() and _state.schedule.is_late()
            if not waiting:
                self.stream.run_delayed(self.position)
            return not waiting

    def synchronize(self) -> None:
        """Block the host until the work before it has been done."""
        if self.stream is not None:
            with detector.lock:
                count_wait(synchronizations=1)
                self._finish()
            sleep_until(self.ready)

    def _finish(self) -> None:
        assert self.stream is not None
        with detector.lock:
            self.stream.run_delayed(self.position)
            joined(detector.host, self.clock)
            check_watched()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`.

        Raises:
            RuntimeError: One of them is not timed, not recorded, or has not passed.
        """
        if not (self.timed and end.timed):
            raise RuntimeError("both events must be made with enable_timing=True")
        if self.stream is None or end.stream is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        if not (self.query() and end.query()):
            raise RuntimeError("both events must be completed before the time between them is known: synchronize")
        assert self._passed is not None
        assert end._passed is not None
        return (end._passed - self._passed) * 1000

    def _host_knows(self) -> bool:
        return all(time <= detector.host.get(number, 0) for number, time in self.clock.items())

    def _pass(self) -> None:
        self._passed = time.perf_counter()


class _Current(threading.local):
    """The current streams of the calling thread, by index of the device, and the last device that it chose one of."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.device = 0


class _State:
    """The streams of this process.

    Attributes:
        strict: Whether work may be late.
        schedule: How late it is.
        streams: All streams that are alive.
        defaults: The default stream of each device: the same for all threads.
        busy: Streams with work to be done.
        is_bad_fork: Whether this process was forked after its parent had used strict accelerators.
        waits: How often the host has waited.
    """

    def __init__(self) -> None:
        self.strict = False
        self.schedule = Schedule()
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.defaults: dict[int, Stream] = {}
        self.busy: set[Stream] = set()
        self.is_bad_fork = False
        self.waits = HostWaits()


_state = _State()
_current = _Current()


def set_schedule(strict: bool, seed: int | None, late_compute: bool = False) -> None:
    """Finish all work, at any speed; from now on work may be late, by the schedule with this seed, if `strict`."""
    with detector.lock:
        finish_all()
        for stream in _state.defaults.values():
            stream.known.clear()
        for stream in list(_state.streams):
            stream.ready = 0.0
        _state.strict, _state.schedule = strict, Schedule(seed, strict and late_compute)
        _state.is_bad_fork = False


def is_compute_late() -> bool:
    """Whether strict accelerators compute late."""
    return _state.schedule.compute


def index_of(device: Any) -> int:
    """Return the index of `device` (an int, text, a torch.device); without one, that of the calling thread's device."""
    if device is None:
        return _current.device
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _current.device if index is None else index


def default_stream(device: Any = None) -> Stream:
    """Return the stream of a device that threads use if they choose no other."""
    index = index_of(device)
    found = _state.defaults.get(index)
    return found if found is not None else _state.defaults.setdefault(index, Stream(index))


def current_stream(device: Any = None) -> Stream:
    """Return the stream that the calling thread launches work on."""
    index = device if type(device) is int else index_of(device)
    return _current.streams.get(index) or _state.defaults.get(index) or default_stream(index)


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Let the calling thread launch work on `chosen` within this context."""
    if chosen is None:
        yield
        return
    streams, index = _current.streams, chosen.device.index
    before, device_before = streams.get(index), _current.device
    streams[index], _current.device = chosen, index
    try:
        yield
    finally:
        _current.device = device_before
        if before is None:
            del streams[index]
        else:
            streams[index] = before


def forked() -> None:
    """In a forked child, take everything as finished that its parent has launched, and refuse strict accelerators that
    it has used."""
    _state.is_bad_fork = _state.strict and detector.time > 0
    finish_all()
    for stream in _state.defaults.values():
        stream.known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forked)


def is_in_bad_fork() -> bool:
    """Whether this process may not use strict accelerators, as its parent had used them before it was forked."""
    return _state.is_bad_fork


def host_waits() -> HostWaits:
    """Return how often the host has waited for strict accelerators since the process began."""
    return _state.waits


def count_wait(copies_to_device: int = 0, copies_to_host: int = 0, synchronizations: int = 0) -> None:
    """Count waits of the host, under the detector's lock."""
    given = (copies_to_device, copies_to_host, synchronizations)
    _state.waits = HostWaits(*(old + new for old, new in zip(_state.waits, given)))


def synchronize(device: Any = None) -> None:
    """Block the host until all work on `device` has been done; None: on the calling thread's device, and no other."""
    index = index_of(device)
    with detector.lock:
        count_wait(synchronizations=1)
        found = [each for each in _state.streams if each.device.index == index]
        for stream in found:
            stream.finish()
    sleep_until(max((stream.ready for stream in found), default=0.0))


def finish_all() -> None:
    """Do all work on all devices, of which the host and all streams know then."""
    with detector.lock:
        while _state.busy:
            next(iter(_state.busy)).run_delayed()
        detector.forget()
        check_watched()
