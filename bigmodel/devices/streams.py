"""Copy streams: bytes that reach a device beside its compute.

A copy stream does its work in order, without blocking the thread that submits it. Where the device has real
streams (CUDA, XPU) the work is queued on one, ordered by events; elsewhere a worker thread does it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch

HAND_OVER_BYTES = 32 * 2**10
"""Handing work to a thread takes as long as copying this many bytes: fewer are copied at once, by the caller."""


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Whether the work up to this point has finished."""
        ...

    def wait(self) -> None:
        """Make what the calling thread computes from now on come after this point.

        Raises:
            Exception: Whatever the awaited work raised.
        """
        ...

    def synchronize(self) -> None:
        """Hold the calling thread until the work up to this point has finished."""
        ...


class CopyStream(Protocol):
    """Copies to one device, in order, beside its compute."""

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        """Queue `work` behind everything queued before and behind `after`; return the event of its completion.

        Args:
            work: Copies something to the device.
            after: What must be done before.
            nbytes: How many bytes it copies, if that is known: few are not worth a thread's attention.
        """
        ...

    def compute_mark(self) -> Event:
        """Return the event of all that the calling thread has given the device to compute so far."""
        ...


def copy_stream(device: torch.device) -> CopyStream:
    """Return a new copy stream for `device`."""
    if device.type in ("cuda", "xpu"):
        return DeviceCopyStream(device)
    return ThreadCopyStream(f"copy to {device}")


class DeviceEvent:
    """An event on a device with streams of its own: waiting for it costs the host nothing."""

    def __init__(self, event: Any, module: Any, device: torch.device) -> None:
        self.event = event
        self._module = module
        self._device = device

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class HostEvent:
    """An event of work that a host thread does."""

    def __init__(self, work: Future[None]) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._work.result()

    synchronize = wait


class PastEvent:
    """An event that had passed before it was asked for; `error` is what its work raised, if it did."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    synchronize = wait


PAST = PastEvent()


class DeviceCopyStream:
    """A copy stream on a stream of the device itself; the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device.type)
        self._device = device
        self._stream = self._module.Stream(device=device)

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        for event in after:
            if isinstance(event, DeviceEvent):
                self._stream.wait_event(event.event)
            else:
                event.synchronize()
        with self._module.stream(self._stream):
            work()
        return self._record(self._stream)

    def compute_mark(self) -> Event:
        return self._record(self._module.current_stream(self._device))

    def _record(self, stream: Any) -> Event:
        event = self._module.Event()
        event.record(stream)
        return DeviceEvent(event, self._module, self._device)


class _Work(threading.local):
    """The copy that the calling thread does for a copy stream: since when it could have begun."""

    due: float | None = None


_work = _Work()


def due() -> float | None:
    """Return since when (`time.perf_counter`) the copy could have begun that the calling thread does for a copy stream.

    A thread takes a moment to turn to the next copy; a device that copies by itself has begun with it by then. None
    outside a copy stream.
    """
    return _work.due


def _do_after(events: Sequence[Event], work: Callable[[], None], queued: float | None = None) -> None:
    """Do `work`, `queued` at that time, once `events` have passed; raise what an awaited one raised."""
    for event in events:
        if not event.done():
            queued = None
        event.synchronize()
    _work.due = time.perf_counter() if queued is None else queued
    try:
        work()
    finally:
        _work.due = None


def _done_here(events: Sequence[Event], work: Callable[[], None]) -> PastEvent:
    """Do `work`, which comes after `events`, at once; return how it ended."""
    try:
        _do_after(events, work)
    except Exception as error:
        return PastEvent(error)
    return PAST


class ThreadCopyStream:
    """A copy stream on a worker thread, for devices whose compute finishes before it returns."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._last: Future[None] | None = None

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        if self._process != os.getpid():
            # Threads do not survive a fork: the child gets a worker of its own.
            self._process = os.getpid()
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
            self._last = None
        if nbytes is not None and nbytes <= HAND_OVER_BYTES and self._is_idle(after):
            return _done_here(after, work)
        self._last = self._worker.submit(_do_after, after, work, time.perf_counter())
        return HostEvent(self._last)

    def compute_mark(self) -> Event:
        return PAST

    def _is_idle(self, after: Sequence[Event]) -> bool:
        """Whether everything queued before has been done, and everything that must come before."""
        return (self._last is None or self._last.done()) and all(event.done() for event in after)


class TimedCopyStream:
    """A copy stream whose busy time is counted.

    Args:
        stream: The copy stream.
        device: Where it leads.
        count: Called with the seconds that a copy took, in whatever thread finds it finished.
    """

    def __init__(self, stream: CopyStream, device: torch.device, count: Callable[[float], None]) -> None:
        self._stream = stream
        self._count = count
        self._module: Any = torch.get_device_module(device.type) if device.type in ("cuda", "xpu") else None
        self._running: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        if self._module is None:
            return self._stream.submit(partial(self._timed_by_host, work), after, nbytes)
        self._count_finished()
        return self._stream.submit(partial(self._timed_by_device, work), after, nbytes)

    def compute_mark(self) -> Event:
        return self._stream.compute_mark()

    def _timed_by_host(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            work()
        finally:
            self._count(time.perf_counter() - started)

    def _timed_by_device(self, work: Callable[[], None]) -> None:
        # The copy stream is the current one here, and what it had to wait for lies before the first of these.
        begin, end = self._module.Event(enable_timing=True), self._module.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        with self._lock:
            self._running.append((begin, end))

    def _count_finished(self) -> None:
        """Count the copies that have ended, without waiting for the others."""
        with self._lock:
            while self._running and self._running[0][1].query():
                begin, end = self._running.popleft()
                self._count(begin.elapsed_time(end) / 1000)
