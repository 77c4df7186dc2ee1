"""State that threads share is used under its lock: without one, a loss would show in one run of thousands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.pinned import empty_host
from bigmodel.devices.virtual import streams
from bigmodel.devices.virtual.arena import Arena, Caching
from bigmodel.devices.virtual.link import VirtualLink
from bigmodel.devices.virtual.pinned import PinnedMemory
from bigmodel.devices.virtual.races import Detector, History, detector
from tests.dispatch.guarded import OwnedLock, guard

device = torch.device("virtual", 0)


class CountingLock:
    """A lock that one thread may take several times.

    Attributes:
        taken: How often it was taken while the thread did not hold it.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.taken += not self._depth
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        self._lock.release()

    def is_held(self) -> bool:
        return bool(self._depth)


class Watch:
    """Notes calls, and those without the detector's lock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = CountingLock()
        self.called: set[str] = set()
        self.unlocked: list[str] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(detector, "lock", self.lock)
        for arena in virtual.board.arenas:
            monkeypatch.setattr(arena, "_lock", self.lock)

    def over(self, owner: Any, *names: str) -> None:
        for name in names:
            self._monkeypatch.setattr(owner, name, self._watched(getattr(owner, name), name))

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            if not self.lock.is_held():
                self.unlocked.append(name)
            return function(*args, **kwargs)

        return called


@pytest.fixture(autouse=True)
def strict_accelerators() -> Iterator[None]:
    virtual.enable(count=2, strict=True, late_compute=True, caching=Caching(workspace=512))
    yield
    torch.get_device_module("virtual").synchronize()
    virtual.races()
    virtual.disable()


def with_work() -> tuple[virtual.Stream, virtual.Event, torch.Tensor]:
    values = torch.zeros(8, device=device)
    values.add_(1)
    stream = virtual.current_stream(device)
    return stream, stream.record_event(), values


CALLS: dict[str, Callable[[virtual.Stream, virtual.Event], object]] = {
    "a stream is made": lambda stream, event: virtual.Stream(device),
    "a stream waits for an event": lambda stream, event: virtual.Stream.wait_event(stream, event),
    "a stream is asked": lambda stream, event: stream.query(),
    "a stream is waited for": lambda stream, event: stream.synchronize(),
    "a stream is finished": lambda stream, event: stream.finish(),
    "a stream catches up": lambda stream, event: stream.catch_up(),
    "an event that has passed is asked": lambda stream, event: (setattr(event, "polls", 9), event.query()),
    "an event is recorded": lambda stream, event: event.record(stream),
    "an event is asked": lambda stream, event: event.query(),
    "the allocator asks an event": lambda stream, event: event.has_passed(),
    "an event is waited for": lambda stream, event: event.synchronize(),
    "an event is finished": lambda stream, event: event._finish(),
    "a device is waited for": lambda stream, event: streams.synchronize(0),
    "all devices are finished": lambda stream, event: streams.finish_all(),
    "the schedule is set": lambda stream, event: streams.set_schedule(True, None, True),
    "all is forgotten": lambda stream, event: detector.forget(),
    "races are asked for": lambda stream, event: virtual.races(),
}


@pytest.mark.parametrize("call", CALLS)
def test_streams_and_events_change_under_one_hold_of_the_lock(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, event, _values = with_work()

    class Noting(dict[int, int]):
        def clear(self) -> None:
            if not watch.lock.is_held():
                watch.unlocked.append("clear")
            super().clear()

    monkeypatch.setattr(detector, "host", Noting(detector.host))
    watch = Watch(monkeypatch)
    watch.over(streams, "count_wait", "joined", "check_watched", "Schedule")
    watch.over(streams.Stream, "run_delayed", "_queue", "clock")
    CALLS[call](stream, event)
    assert watch.unlocked == []
    assert watch.lock.taken == 1


def test_launches_are_checked_and_queued_under_one_hold_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    _stream, _event, values = with_work()
    staging, other = empty_host(32, pin=True).view(torch.float32), torch.zeros(8, device="virtual:1")
    watch = Watch(monkeypatch)
    watch.over(Detector, "launch", "_read", "_write", "is_ordered")
    watch.over(streams.Stream, "finish", "catch_up", "delay", "delay_compute", "wait_stream")
    values.mul_(2)
    values.copy_(staging, non_blocking=True)
    values.copy_(torch.ones(8))
    staging.copy_(values, non_blocking=True)
    other.copy_(values)
    values[values > 0].sum()
    values.cpu()
    assert watch.unlocked == []


def test_the_detector_notes_accesses_under_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    _stream, _event, values = with_work()
    watch = Watch(monkeypatch)
    watch.over(Detector, "launch", "allocated", "freed", "_read", "_write")
    watch.over(History, "accesses")
    doubled = values * 2
    values.add_(doubled)
    values.copy_(torch.ones(8))
    del doubled
    assert watch.called >= {"launch", "allocated", "freed", "_read", "_write", "accesses"}
    assert watch.unlocked == []


def test_the_books_of_a_device_change_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    with_work()
    arena = virtual.board.arena(0)
    watch = Watch(monkeypatch)
    watch.over(Arena, "_allocate", "_free")
    watch.over(type(arena.memory), "allocate", "free", "empty_cache", "reset_peaks")
    values = torch.ones(8, 8, device=device)
    torch.mm(values, values)
    del values
    arena.reset_peak()
    arena.empty_cache()
    assert watch.unlocked == []


def test_pinned_memory_is_looked_up_under_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = guard(monkeypatch, PinnedMemory, "_begins")
    memory = PinnedMemory()
    first = memory.empty(10)
    assert (memory.requested, memory.reserved, memory.holds(first)) == (10, 16, True)
    del first
    assert (memory.requested, memory.reserved) == (0, 0)
    assert noted == []


@pytest.mark.parametrize("to_device", [False, True])
def test_copies_over_a_link_are_counted_under_the_lock_of_their_direction(
    to_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = VirtualLink()
    link._lock = OwnedLock()  # type: ignore[attr-defined]
    setattr(link, "_to_device" if to_device else "_to_host", link._lock)  # type: ignore[attr-defined]
    noted = guard(monkeypatch, VirtualLink, "bytes_to_device" if to_device else "bytes_to_host")
    link.transfer(lambda: None, 8, to_device=to_device)
    assert noted == []
    assert link._lock.entered == 1  # type: ignore[attr-defined]
