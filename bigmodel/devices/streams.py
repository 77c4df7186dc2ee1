"""Copy streams: copies to a device that run concurrently with its compute.

A copy stream does its work in order, without blocking the thread that submits it. On a device with streams (CUDA, XPU)
the work is queued on one and ordered by events; on others a worker thread does it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch

HAND_OVER_BYTES = 32 * 2**10
"""Copies of at most so many bytes are done by the caller: handing them to a thread would take longer."""


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Whether the work up to this point has finished."""
        ...

    def wait(self) -> None:
        """Order all later compute of the calling thread after this point.

        Raises:
            Exception: The error of the awaited work.
        """
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the work up to this point has finished."""
        ...


class CopyStream(Protocol):
    """Copies to one device, in order, concurrent with its compute."""

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        """Queue `work` behind everything queued before and behind `after`; return the event of its completion.

        Args:
            work: Copies something to the device.
            after: Events that must have passed before.
            nbytes: Bytes that it copies, if known; up to `HAND_OVER_BYTES` may be copied by the caller.
        """
        ...

    def compute_mark(self) -> Event:
        """Return the event of all compute that the calling thread has launched on the device so far."""
        ...

    def uses(self, memory: torch.Tensor) -> None:
        """Tell the device's allocator that this stream uses `memory`, which was allocated for compute.

        Freed while a copy is under way, it is then not given to others before that has finished.
        """
        ...


def has_streams(device: torch.device) -> bool:
    """Whether work on `device` is queued on streams, asynchronously to the host."""
    if device.type in ("cuda", "xpu"):
        return True
    return device.type == "virtual" and bool(torch.get_device_module("virtual").has_streams(device))


def copy_stream(device: torch.device) -> CopyStream:
    """Return a new copy stream for `device`."""
    if has_streams(device):
        return DeviceCopyStream(device)
    return ThreadCopyStream(f"copy to {device}")


class DeviceEvent:
    """An event on a device with streams: `wait` makes the current stream wait, not the host."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self.event = event
        self._device = device

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        current_stream(self._device).wait_event(self.event)

    def wait_on(self, stream: Any) -> None:
        """Order all later work of `stream`, of any device, after this point."""
        stream.wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


def compute_mark(device: torch.device) -> Event:
    """Return the event of all work that the calling thread has launched on `device`, which has streams."""
    return _recorded(current_stream(device), device)


def timed_mark(device: torch.device) -> DeviceEvent:
    """Return `compute_mark`, between two of which the seconds can be asked (`seconds_between`)."""
    return _recorded(current_stream(device), device, timed=True)


def seconds_between(begin: DeviceEvent, end: DeviceEvent) -> float:
    """Return the seconds from one timed mark to another of the same device. Both have passed."""
    return float(begin.event.elapsed_time(end.event)) / 1000


def _recorded(stream: Any, device: torch.device, timed: bool = False) -> DeviceEvent:
    module: Any = torch.get_device_module(device.type)
    # A host that waits for a blocking event sleeps; for others of CUDA it spins, on a core that readers need.
    options = {} if device.type == "xpu" else {"blocking": True}
    event = module.Event(enable_timing=timed, **options)
    event.record(stream)
    return DeviceEvent(event, device)


_cuda_streams: dict[tuple[int, int, int], Any] = {}
"""CUDA streams by what identifies them."""


def current_stream(device: torch.device) -> Any:
    """Return the calling thread's current stream of `device`, as ``torch.cuda.current_stream`` does.

    That takes 17 us, most of it for finding out whether there is CUDA: too long for each block of a forward.
    """
    if device.type != "cuda" or device.index is None:
        return torch.get_device_module(device.type).current_stream(device)
    return _cuda_stream(torch._C._cuda_getCurrentStream(device.index))


def _cuda_stream(key: tuple[int, int, int]) -> Any:
    stream = _cuda_streams.get(key)
    if stream is None:
        stream_id, index, kind = key
        stream = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)
        _cuda_streams[key] = stream
    return stream


@contextmanager
def _on(stream: Any, device: torch.device) -> Iterator[None]:
    """Within this context, `stream` is the current stream of its device, as with ``torch.cuda.stream``."""
    if device.type != "cuda" or torch._C._cuda_getDevice() != device.index:
        with torch.get_device_module(device.type).stream(stream):
            yield
        return
    before = _cuda_stream(torch._C._cuda_getCurrentStream(device.index))
    _set_cuda_stream(stream)
    try:
        yield
    finally:
        _set_cuda_stream(before)


def _set_cuda_stream(stream: Any) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def new_stream(device: torch.device) -> Any:
    """Return a new stream of `device`, which has streams."""
    return torch.get_device_module(device.type).Stream(device=device)


@contextmanager
def on_streams(streams: Iterable[tuple[torch.device, Any]]) -> Iterator[None]:
    """Within this context, each of these streams is the current one of its device for the calling thread.

    The last one's device is the current device.
    """
    with ExitStack() as entered:
        for device, stream in streams:
            entered.enter_context(torch.get_device_module(device.type).stream(stream))
        yield


class HostEvent:
    """An event of work done by a host thread."""

    def __init__(self, work: Future[None]) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._work.result()

    synchronize = wait


class PastEvent:
    """An event that has passed already; `error` is the exception of its work, if any."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    synchronize = wait


PAST = PastEvent()


_device_streams: weakref.WeakSet[DeviceCopyStream] = weakref.WeakSet()


def wait_for_copies() -> None:
    """Block the calling thread until no copy stream of a device reads host memory any more.

    Worker threads are not waited for: what they read while it was written is never computed with, as compute is
    launched once they are done, and memory that was written to since is fetched again.
    """
    for stream in list(_device_streams):
        stream.synchronize()


class DeviceCopyStream:
    """A copy stream backed by a stream of the device; the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.get_device_module(device.type).Stream(device=device)
        _device_streams.add(self)

    def synchronize(self) -> None:
        """Block the calling thread until all queued work is done."""
        self._stream.synchronize()

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        for event in after:
            if isinstance(event, DeviceEvent):
                self._stream.wait_event(event.event)
            else:
                event.synchronize()
        with _on(self._stream, self._device):
            work()
        return _recorded(self._stream, self._device, timed=True)

    def compute_mark(self) -> Event:
        return compute_mark(self._device)

    def uses(self, memory: torch.Tensor) -> None:
        memory.record_stream(self._stream)


class _CurrentCopy(threading.local):
    """The copy that the calling thread runs for a copy stream."""

    ready_since: float | None = None


_current_copy = _CurrentCopy()


def copy_ready_since() -> float | None:
    """Return since when (`time.perf_counter`) the copy that the calling thread runs could have begun.

    A worker thread starts a copy some time after the previous one has ended; a device that copies by itself starts it
    at once. None outside a copy stream.
    """
    return _current_copy.ready_since


def _run_after(events: Sequence[Event], work: Callable[[], None], queued: float | None = None) -> None:
    """Wait for `events`, then run `work`, which was submitted at the time `queued`; an error of an event is raised."""
    for event in events:
        if not event.done():
            queued = None
        event.synchronize()
    _current_copy.ready_since = time.perf_counter() if queued is None else queued
    try:
        work()
    finally:
        _current_copy.ready_since = None


def _run_in_caller(events: Sequence[Event], work: Callable[[], None]) -> PastEvent:
    """Run `work` in the calling thread, as `events` have passed; return an event with its error, or theirs, if any."""
    try:
        for event in events:
            event.synchronize()
        work()
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
            # Threads do not survive a fork: the child creates its own worker.
            self._process = os.getpid()
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
            self._last = None
        if nbytes is not None and nbytes <= HAND_OVER_BYTES and self._is_idle(after):
            return _run_in_caller(after, work)
        self._last = self._worker.submit(_run_after, after, work, time.perf_counter())
        return HostEvent(self._last)

    def compute_mark(self) -> Event:
        return PAST

    def uses(self, memory: torch.Tensor) -> None:
        """Do nothing: queued copies refer to the memory."""

    def _is_idle(self, after: Sequence[Event]) -> bool:
        """Whether all queued work is done and all events in `after` have passed."""
        return (self._last is None or self._last.done()) and (not after or all(event.done() for event in after))


class TimedCopyStream:
    """A copy stream whose busy time is measured.

    Args:
        stream: The copy stream.
        device: The device that it copies to.
        count: Called with the seconds of each finished copy, in any thread.
    """

    def __init__(self, stream: CopyStream, device: torch.device, count: Callable[[float], None]) -> None:
        self._stream = stream
        self._device = device
        self._count = count
        self._module: Any = torch.get_device_module(device.type) if has_streams(device) else None
        self._running: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        if self._module is None:
            return self._stream.submit(partial(self._timed_by_host, work), after, nbytes)
        self._count_finished()
        begin = self._module.Event(enable_timing=True)
        arrived = self._stream.submit(partial(self._begun, begin, work), after, nbytes)
        assert isinstance(arrived, DeviceEvent)
        with self._lock:
            self._running.append((begin, arrived.event))
        return arrived

    def compute_mark(self) -> Event:
        return self._stream.compute_mark()

    def uses(self, memory: torch.Tensor) -> None:
        self._stream.uses(memory)

    def _timed_by_host(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            work()
        finally:
            self._count(time.perf_counter() - started)

    def _begun(self, begin: Any, work: Callable[[], None]) -> None:
        # The copy stream is the current stream here; its waits come before this event.
        begin.record(current_stream(self._device))
        work()

    def _count_finished(self) -> None:
        """Count the copies that have finished, without waiting for the others."""
        with self._lock:
            while self._running and self._running[0][1].query():
                begin, end = self._running.popleft()
                self._count(begin.elapsed_time(end) / 1000)
