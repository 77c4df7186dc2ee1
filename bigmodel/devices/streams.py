"""Copy streams: bytes that reach a device beside its compute.

A copy stream does what it is given in order, without holding up the thread that gives it. Where the device has real
streams (CUDA, XPU) the work is queued on one, ordered by events; elsewhere a worker thread does it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch


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

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """Queue `work` behind everything queued before and behind `after`; return the event of its completion."""
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
    """An event of work that a host thread does; None for work that was done before it was asked for."""

    def __init__(self, work: Future[None] | None = None) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work is None or self._work.done()

    def wait(self) -> None:
        if self._work is not None:
            self._work.result()

    synchronize = wait


class DeviceCopyStream:
    """A copy stream on a stream of the device itself; the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device.type)
        self._device = device
        self._stream = self._module.Stream(device=device)

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
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


class ThreadCopyStream:
    """A copy stream on a worker thread, for devices whose compute finishes before it returns."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        if self._process != os.getpid():
            # Threads do not survive a fork: the child gets a worker of its own.
            self._process = os.getpid()
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        return HostEvent(self._worker.submit(work))

    def compute_mark(self) -> Event:
        return HostEvent()
