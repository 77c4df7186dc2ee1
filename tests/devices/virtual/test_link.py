import threading
import time

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.virtual import VirtualLink


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


def test_what_moves_nothing_waits_for_nothing() -> None:
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
