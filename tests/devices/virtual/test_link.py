import importlib
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from bigmodel.devices import streams, virtual
from bigmodel.devices.virtual import VirtualLink
from bigmodel.errors import DeviceError

link_module = importlib.import_module("bigmodel.devices.virtual.link")  # `virtual.link` is a function
clock_module = importlib.import_module("bigmodel.devices.virtual.clock")


def test_a_copy_takes_at_least_the_time_of_its_bytes() -> None:
    link = VirtualLink(bandwidth=1e6, latency=0.001)
    assert link.seconds(10_000) == pytest.approx(0.011)
    started = time.perf_counter()
    link.transfer(lambda: None, 10_000, to_device=True)
    assert time.perf_counter() - started >= 0.011
    assert (link.bytes_to_device, link.bytes_to_host) == (10_000, 0)


def test_copies_in_one_direction_queue_behind_each_other() -> None:
    link = VirtualLink(bandwidth=1e6)
    started = time.perf_counter()
    copies = [
        threading.Thread(target=link.transfer, args=(lambda: None, 10_000), kwargs={"to_device": True}) for _ in "ab"
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.join()
    assert time.perf_counter() - started >= 0.02


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (streams, link_module, clock_module):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


def test_queued_copies_follow_each_other_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream's thread is slow to turn to the next copy; the link is not."""
    clock, gate = Clock(monkeypatch), threading.Event()
    link, stream = VirtualLink(bandwidth=1e6), streams.ThreadCopyStream("test")

    def copy() -> None:
        clock.sleep(0.01)  # the thread is elsewhere
        link.transfer(lambda: None, 20_000, to_device=True)

    stream.submit(lambda: gate.wait(30) and None)
    events = [stream.submit(copy) for _ in range(3)]
    gate.set()
    for event in events:
        event.wait()
    assert clock.now == pytest.approx(3 * 0.02, abs=1e-4)
    assert streams.copy_ready_since() is None


def test_a_link_is_not_held_up_by_a_thread_that_is_slow_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the interpreter, perhaps, while a real device copies by itself."""
    clock, gate = Clock(monkeypatch), threading.Event()
    link, stream = VirtualLink(bandwidth=1e6), streams.ThreadCopyStream("test")
    stream.submit(lambda: gate.wait(30) and None)
    taken = [0.03, 0.0, 0.0]
    copies = [partial(link.transfer, partial(clock.sleep, each), 20_000, to_device=True) for each in taken]
    events = [stream.submit(copy) for copy in copies]
    gate.set()
    for event in events:
        event.wait()
    assert clock.now == pytest.approx(3 * 0.02, abs=1e-4)


def test_a_copy_stream_that_was_idle_begins_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    link, stream = VirtualLink(bandwidth=1e6), streams.ThreadCopyStream("test")
    for _ in range(3):
        stream.submit(lambda: link.transfer(lambda: None, 20_000, to_device=True)).wait()
        clock.sleep(0.01)
    assert clock.now == pytest.approx(3 * 0.03, abs=1e-4)


def test_a_copy_that_was_not_waiting_begins_when_it_is_asked_for() -> None:
    link = VirtualLink(bandwidth=1e6)
    link.transfer(lambda: None, 10_000, to_device=True)
    asked = time.perf_counter()
    link.transfer(lambda: None, 10_000, to_device=True)
    assert time.perf_counter() - asked >= 0.01


@pytest.mark.usefixtures("accelerators")
def test_copies_between_host_and_device_pass_over_the_link() -> None:
    x = torch.ones(100, dtype=torch.uint8)
    there = x.to("virtual:1")
    there.cpu()
    there[:10] + 1
    there.copy_(x)
    assert virtual.link(1).bytes_to_device == 200
    assert virtual.link(1).bytes_to_host == 100
    assert virtual.link(0).bytes_to_device == 0


def test_transfers_of_no_bytes_take_no_time() -> None:
    link = VirtualLink(bandwidth=1e6)
    begun, may_end = threading.Event(), threading.Event()

    def long_copy() -> None:
        begun.set()
        may_end.wait()

    busy = threading.Thread(target=link.transfer, args=(long_copy, 10), kwargs={"to_device": True})
    busy.start()
    begun.wait()
    done: list[int] = []
    empty = threading.Thread(target=link.transfer, args=(lambda: done.append(1), 0), kwargs={"to_device": True})
    empty.start()
    empty.join(timeout=30)
    may_end.set()
    busy.join()
    assert done == [1]
    assert not empty.is_alive()


def test_a_launch_takes_the_hosts_time_and_what_launches_nothing_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    virtual.enable(count=2, strict=True, late_compute=True, launch_cost=0.001)
    virtual.configure(1)

    def milliseconds(work: Callable[[], object]) -> int:
        before = clock.now
        work()
        return round((clock.now - before) * 1000)

    x, host = torch.ones(8, device="virtual:0"), torch.ones(8)
    pinned = virtual.pinned_memory.empty(32).view(torch.float32).fill_(1)
    assert milliseconds(lambda: x + 1) == 1
    assert milliseconds(lambda: x.add_(1).mul_(2)) == 2
    assert milliseconds(lambda: torch.arange(8, device="virtual:0")) == 1
    assert milliseconds(lambda: x.copy_(pinned, non_blocking=True)) == 1
    assert milliseconds(lambda: host.to("virtual:0")) == 1
    assert milliseconds(lambda: x.to("cpu")) == 1
    assert milliseconds(lambda: x[2].item()) == 1
    assert milliseconds(lambda: x.view(2, 4)[0].t()) == 0
    assert milliseconds(lambda: torch.empty(8, device="virtual:0")) == 0
    assert milliseconds(lambda: torch.ones(8, device="virtual:1") + 1) == 0
    virtual.disable()


def test_work_is_done_after_launches_that_took_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator that computes by itself, launches and computation overlap."""
    clock = Clock(monkeypatch)
    virtual.enable(count=1, strict=True, late_compute=True, launch_cost=0.001)
    x = torch.zeros(8, device="virtual:0")
    torch.get_device_module("virtual").synchronize(0)
    launched = clock.now
    for _ in range(5):
        x.add_(1)
    assert clock.now - launched == pytest.approx(0.005, abs=1e-4)
    assert x.held.eq(0).all()  # type: ignore[attr-defined]
    torch.get_device_module("virtual").synchronize(0)
    assert clock.now - launched == pytest.approx(0.005, abs=1e-4)
    assert x.held.eq(5).all()  # type: ignore[attr-defined]
    virtual.disable()


def test_a_launch_that_would_cost_less_than_nothing_is_refused() -> None:
    with pytest.raises(DeviceError, match="launch_cost -1"):
        virtual.enable(count=1, launch_cost=-1)
