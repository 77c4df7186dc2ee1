import os
import threading
import time

import pytest
import torch

from bigmodel.devices import copy_stream, virtual
from bigmodel.devices.streams import HAND_OVER_BYTES, ThreadCopyStream, TimedCopyStream, compute_mark, copy_ready_since


def test_work_runs_in_order_beside_the_caller() -> None:
    stream = ThreadCopyStream("test")
    gate = threading.Event()
    done: list[int] = []

    def wait_at_the_gate() -> None:
        gate.wait(10)
        done.append(1)

    first = stream.submit(wait_at_the_gate)
    second = stream.submit(lambda: done.append(2))
    assert not first.done()
    gate.set()
    second.wait()
    assert done == [1, 2]
    assert first.done()


def test_errors_of_the_work_are_raised_in_the_waiter() -> None:
    stream = ThreadCopyStream("test")

    def fail() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        stream.submit(fail).wait()
    stream.submit(lambda: None).wait()


def test_few_bytes_are_copied_at_once_but_not_before_what_is_under_way() -> None:
    stream = ThreadCopyStream("test")
    gate = threading.Event()
    callers: list[str] = []

    def work() -> None:
        callers.append(threading.current_thread().name)

    assert stream.submit(work, nbytes=HAND_OVER_BYTES).done()
    stream.submit(lambda: gate.wait(10) and None)
    behind = stream.submit(work, nbytes=HAND_OVER_BYTES)
    assert not behind.done()
    gate.set()
    behind.wait()
    stream.submit(work, nbytes=HAND_OVER_BYTES + 1).wait()
    assert callers[0] == threading.current_thread().name
    assert all(name.startswith("test") for name in callers[1:])


def test_errors_of_a_small_copy_are_raised_in_the_waiter_and_not_the_submitter() -> None:
    def fail() -> None:
        raise OSError("the link is down")

    event = ThreadCopyStream("test").submit(fail, nbytes=1)
    with pytest.raises(OSError, match="the link is down"):
        event.wait()


def test_few_bytes_are_not_copied_behind_what_has_failed() -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    before = ThreadCopyStream("before").submit(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        before.wait()
    copied: list[int] = []
    event = ThreadCopyStream("test").submit(lambda: copied.append(1), [before], nbytes=1)
    with pytest.raises(OSError, match="the disk is gone"):
        event.wait()
    assert copied == []


@pytest.mark.slow
def test_a_stream_survives_a_fork() -> None:
    stream = ThreadCopyStream("test")
    stream.submit(lambda: None).wait()
    child = os.fork()
    if child == 0:
        try:
            stream.submit(lambda: None).wait()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_the_thread_ends_with_the_stream() -> None:
    stream = ThreadCopyStream("copy that ends")
    stream.submit(lambda: None).wait()
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("copy that ends")]
    assert workers
    del stream
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()


def test_a_thread_waits_for_what_must_come_first() -> None:
    first, second = ThreadCopyStream("first"), ThreadCopyStream("second")
    gate = threading.Event()
    order: list[str] = []

    def slow() -> None:
        assert gate.wait(30)
        order.append("first")

    before = first.submit(slow)
    after = second.submit(lambda: order.append("second"), (before,), nbytes=1)
    assert not after.done()
    gate.set()
    after.wait()
    assert order == ["first", "second"]


def test_work_that_waits_for_a_failure_fails_with_it() -> None:
    first, second = ThreadCopyStream("first"), ThreadCopyStream("second")
    done: list[str] = []

    def fail() -> None:
        raise OSError("no disk")

    after = second.submit(lambda: done.append("second"), (first.submit(fail),))
    with pytest.raises(OSError, match="no disk"):
        after.wait()
    assert done == []


def timed(seconds: list[float]) -> TimedCopyStream:
    host = torch.device("cpu")
    return TimedCopyStream(copy_stream(host), host, seconds.append)


def test_a_timed_stream_copies_in_order_and_counts_the_time() -> None:
    seconds: list[float] = []
    stream = timed(seconds)
    gate, done = threading.Event(), []

    def first() -> None:
        assert gate.wait(30)
        done.append(1)

    stream.submit(first)
    last = stream.submit(lambda: done.append(2))
    assert done == []
    gate.set()
    last.wait()
    assert done == [1, 2]
    assert sum(seconds) > 0


def test_a_timed_stream_counts_a_copy_that_fails() -> None:
    seconds: list[float] = []
    event = timed(seconds).submit(lambda: torch.zeros(2).copy_(torch.zeros(3)) and None)
    with pytest.raises(RuntimeError, match="size"):
        event.wait()
    assert seconds[0] > 0


@pytest.mark.usefixtures("accelerators")
def test_a_stream_of_a_device_waits_for_what_a_thread_does_first() -> None:
    order: list[str] = []
    first = ThreadCopyStream("first").submit(lambda: order.append("first"))
    device = copy_stream(torch.device("virtual", 0))

    class Noted:
        """The thread's event, which notes that it was waited for."""

        def synchronize(self) -> None:
            first.synchronize()
            order.append("waited")

        wait = synchronize

        def done(self) -> bool:
            return first.done()

    device.submit(lambda: order.append("second"), (Noted(),)).wait()
    assert order == ["first", "waited", "second"]


@pytest.mark.virtual_only("looks into events")
def test_a_host_that_waits_for_a_copy_sleeps() -> None:
    """Who spins takes a core that readers need."""
    virtual.enable(count=1, strict=True)
    device = torch.device("virtual", 0)
    events = [compute_mark(device), copy_stream(device).submit(lambda: None), copy_stream(device).compute_mark()]
    assert all(event.event.blocking for event in events)  # type: ignore[attr-defined]
    virtual.disable()


def test_a_copy_could_not_begin_before_what_it_waited_for_had_passed() -> None:
    """The link's time of a copy begins then, also if the copy was submitted long before."""
    first, second = ThreadCopyStream("first"), ThreadCopyStream("second")
    gate = threading.Event()
    passed: list[float] = []
    ready: list[float | None] = []
    before = first.submit(lambda: passed.append(time.perf_counter()) if gate.wait(30) else None)
    after = second.submit(lambda: ready.append(copy_ready_since()), (before,))
    gate.set()
    after.wait()
    (since,) = ready
    assert since is not None
    assert since >= passed[0]
