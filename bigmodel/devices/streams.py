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


class CopyStream(Protocol):
    """Copies to one device, in order, beside its compute."""

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """Queue `work` behind everything queued before and behind the events `after`; return its completion."""
        ...

    def compute_mark(self) -> Event:
        """Return an event that is done when what the calling thread has given the device to compute so far is done."""
        ...

    def wait(self, event: Event) -> None:
        """Make what the calling thread computes from now on come after `event`.

        Raises:
            Exception: Whatever the awaited work raised.
        """
        ...


def copy_stream(device: torch.device) -> CopyStream:
    """Return a new copy stream for `device`."""
    if device.type in ("cuda", "xpu"):
        return DeviceCopyStream(device)
    return ThreadCopyStream(f"copy to {device}")


class DeviceCopyStream:
    """A copy stream on a stream of the device itself; the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device.type)
        self._device = device
        self._stream = self._module.Stream(device=device)

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        for event in after:
            self._stream.wait_event(event)
        with self._module.stream(self._stream):
            work()
            event = self._module.Event()
            event.record(self._stream)
        return _DeviceEvent.of(event)

    def compute_mark(self) -> Event:
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return _DeviceEvent.of(event)

    def wait(self, event: Event) -> None:
        self._module.current_stream(self._device).wait_event(event)


class _DeviceEvent:
    """Gives the device's own event the name `done` for its `query`."""

    @staticmethod
    def of(event: Any) -> Any:
        event.done = event.query
        return event


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
        return self._worker.submit(work)

    def compute_mark(self) -> Event:
        finished: Future[None] = Future()
        finished.set_result(None)
        return finished

    def wait(self, event: Event) -> None:
        if isinstance(event, Future):
            event.result()
