"""Accelerators of a set speed: results are there at once, and the time is when they would be."""

from __future__ import annotations

import time

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.pinned import on_device
from bigmodel.devices.virtual.clock import ComputeClock
from bigmodel.errors import DeviceError

LATER = 1e6
"""Seconds from now at which nothing has been computed yet."""

OPERANDS = torch.zeros(10, 50), torch.zeros(50, 100)
SECONDS = 2 * 10 * 50 * 100 / 1e3


def test_a_product_takes_as_long_as_its_operations() -> None:
    begin = time.perf_counter() + LATER
    assert ComputeClock(1e3).compute(begin, OPERANDS) == pytest.approx(begin + SECONDS)
    assert ComputeClock().compute(begin, OPERANDS) == begin


def test_products_of_one_device_are_computed_one_at_a_time() -> None:
    clock, begin = ComputeClock(1e3), time.perf_counter() + LATER
    ends = [clock.compute(begin, OPERANDS) for _ in range(3)]
    assert ends == pytest.approx([begin + SECONDS, begin + 2 * SECONDS, begin + 3 * SECONDS])


def test_a_product_launched_later_may_be_computed_while_the_device_is_idle() -> None:
    clock, begin = ComputeClock(1e3), time.perf_counter() + LATER
    clock.compute(begin, OPERANDS)
    clock.compute(begin + 2.5 * SECONDS, OPERANDS)
    assert clock.compute(begin, OPERANDS) == pytest.approx(begin + 2 * SECONDS)
    assert clock.compute(begin, OPERANDS) == pytest.approx(begin + 4.5 * SECONDS)  # half a product fits before


@pytest.fixture
def slow(accelerators: None) -> torch.Tensor:
    """A matrix on an accelerator that would compute its square for days."""
    virtual.enable(2, flops=1e-3)
    return torch.ones(8, 8, device="virtual:0")


@pytest.mark.virtual_only("accelerators of a set speed")
def test_the_host_does_not_wait_for_what_it_launches(slow: torch.Tensor) -> None:
    begin, end = (torch.get_device_module("virtual").Event(enable_timing=True) for _ in "ab")
    stream = virtual.current_stream("virtual:0")
    begin.record(stream)
    product = slow @ slow
    end.record(stream)
    there = product.to("cpu", non_blocking=True)
    assert there.sum() == 8 * 8 * 8
    begin.synchronize()
    assert not end.query()
    assert stream.ready - time.perf_counter() > 1e5
    on_device(torch.ones(2), slow.device)  # from pinned memory: not held up either


@pytest.mark.virtual_only("accelerators of a set speed")
def test_streams_take_over_the_times_of_events_and_copies(slow: torch.Tensor) -> None:
    device = torch.get_device_module("virtual")
    first, second, other = virtual.current_stream(0), device.Stream("virtual:0"), virtual.current_stream(1)
    product = slow @ slow
    assert second.ready == 0
    second.wait_stream(first)
    assert second.ready == first.ready > 0
    product.to("virtual:1")
    assert other.ready == first.ready


@pytest.mark.slow
@pytest.mark.virtual_only("accelerators of a set speed")
def test_the_host_waits_for_what_it_reads(accelerators: None) -> None:
    virtual.enable(1, flops=1e5)
    x = torch.ones(10, 50, device="virtual:0")
    begun = time.perf_counter()
    assert (x @ x.T).cpu()[0, 0] == 50
    assert time.perf_counter() - begun >= 0.1
    for wait in (virtual.current_stream(0).synchronize, torch.get_device_module("virtual").synchronize):
        begun = time.perf_counter()
        x @ x.T
        wait()
        assert time.perf_counter() - begun >= 0.1


def test_a_speed_goes_with_no_bandwidth(accelerators: None) -> None:
    with pytest.raises(DeviceError, match="either a bandwidth or flops"):
        virtual.enable(1, flops=1e9, bandwidth=1e9)
    with pytest.raises(DeviceError, match="must not be negative"):
        virtual.enable(1, flops=-1)
