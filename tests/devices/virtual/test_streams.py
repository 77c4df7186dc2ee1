"""Copies arrive late, as late as events allow; what is read before is garbage."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.pinned import empty_host

device = torch.device("virtual", 0)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    virtual.enable(count=2, strict=True, late_compute=False)
    yield
    virtual.disable()


def pinned(value: int) -> torch.Tensor:
    return empty_host(8, pin=True).fill_(value)


def copied_beside(target: torch.Tensor, source: torch.Tensor) -> virtual.Event:
    """Copy on a stream of its own; return the event of the copy."""
    side = virtual.Stream(device)
    side.wait_stream(virtual.current_stream(device))
    target.record_stream(side)
    with virtual.stream(side):
        target.copy_(source, non_blocking=True)
        return side.record_event()


def elements(tensor: torch.Tensor) -> list[int]:
    """Return what a strict device holds now, without launching anything."""
    return tensor.held.tolist()


def test_a_copy_from_pinned_memory_is_done_when_something_needs_it() -> None:
    target = torch.zeros(8, dtype=torch.uint8, device=device)
    event = copied_beside(target, pinned(7))
    assert elements(target) == [0] * 8
    event.wait()
    assert target.tolist() == [7] * 8


def test_a_copy_from_pageable_memory_is_done_when_the_call_returns() -> None:
    target, source = torch.zeros(8, dtype=torch.uint8, device=device), torch.full((8,), 7, dtype=torch.uint8)
    event = copied_beside(target, source)
    source.fill_(1)
    event.wait()
    assert target.tolist() == [7] * 8


def test_a_copy_from_pageable_memory_holds_the_host_until_the_stream_has_got_there() -> None:
    first, second = (torch.zeros(8, dtype=torch.uint8, device=device) for _ in range(2))
    side = virtual.Stream(device)
    side.wait_stream(virtual.current_stream(device))
    for target in (first, second):
        target.record_stream(side)
    with virtual.stream(side):
        first.copy_(pinned(7), non_blocking=True)
        assert elements(first) == [0] * 8
        second.copy_(torch.ones(8, dtype=torch.uint8), non_blocking=True)
    assert elements(first) == [7] * 8
    side.synchronize()


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_chooses_what_is_late(seed: int) -> None:
    late = []
    for _ in range(2):
        virtual.enable(count=2, strict=True, seed=seed, late_compute=False)
        targets = [torch.zeros(8, dtype=torch.uint8, device=device) for _ in range(16)]
        events = [copied_beside(target, pinned(7)) for target in targets]
        late.append([elements(target)[0] == 0 for target in targets])
        for event, target in zip(events, targets):
            event.wait()
            assert target.tolist() == [7] * 8
    assert late[0] == late[1]
    assert 0 < sum(late[0]) < 16


def test_what_comes_to_the_host_without_blocking_is_garbage_until_it_waits() -> None:
    values = torch.arange(8.0, device=device)
    arrived = values.to("cpu", non_blocking=True)
    assert arrived.tolist() != list(range(8))
    values.add_(1)
    virtual.current_stream(device).synchronize()
    assert arrived.tolist() == list(range(8))


def test_a_value_that_is_read_waits_for_its_stream_and_for_no_other() -> None:
    targets = [torch.zeros(8, dtype=torch.uint8, device=device) for _ in range(2)]
    sides = [virtual.Stream(device) for _ in targets]
    for target, side in zip(targets, sides, strict=True):
        side.wait_stream(virtual.current_stream(device))
        target.record_stream(side)
        with virtual.stream(side):
            target.copy_(pinned(7), non_blocking=True)
    with virtual.stream(sides[0]):
        assert targets[0][3].item() == 7
    assert elements(targets[1]) == [0] * 8
    sides[1].synchronize()
    assert elements(targets[1]) == [7] * 8


def test_into_pageable_memory_a_copy_always_blocks() -> None:
    target = torch.zeros(8)
    target.copy_(torch.ones(8, device=device), non_blocking=True)
    assert target.tolist() == [1.0] * 8


def test_an_event_is_passed_when_it_has_been_asked_often_enough() -> None:
    target = torch.zeros(8, dtype=torch.uint8, device=device)
    event = copied_beside(target, pinned(7))
    asked = [event.query() for _ in range(4)]
    assert asked == sorted(asked)
    assert asked[0] is False
    assert asked[-1] is True
    assert elements(target) == [7] * 8


def test_events_that_are_timed_tell_the_time_of_their_work() -> None:
    target, side = torch.zeros(8, dtype=torch.uint8, device=device), virtual.Stream(device)
    side.wait_stream(virtual.current_stream(device))
    target.record_stream(side)
    begin, end = virtual.Event(enable_timing=True), virtual.Event(enable_timing=True)
    with virtual.stream(side):
        begin.record()
        target.copy_(pinned(7), non_blocking=True)
        end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 0
    assert elements(target) == [7] * 8


def test_waits_of_the_host_are_counted_by_kind() -> None:
    def waits(work: Callable[[], object]) -> virtual.HostWaits:
        before = virtual.host_waits()
        work()
        return virtual.host_waits().since(before)

    device = torch.ones(4, device="virtual:0")
    pinned = virtual.pinned_memory.empty(16).view(torch.float32).fill_(1)
    event = virtual.Event()
    event.record()
    assert waits(lambda: device.copy_(pinned, non_blocking=True)) == (0, 0, 0)
    assert waits(lambda: device.copy_(torch.ones(4), non_blocking=True)) == (1, 0, 0)  # pageable memory
    assert waits(lambda: device.copy_(pinned)) == (1, 0, 0)
    assert waits(lambda: pinned.copy_(device, non_blocking=True)) == (0, 0, 0)
    assert waits(device.cpu) == (0, 1, 0)
    assert waits(device.sum().item) == (0, 1, 0)
    assert waits(event.synchronize) == (0, 0, 1)
    assert waits(virtual.current_stream(0).synchronize) == (0, 0, 1)
