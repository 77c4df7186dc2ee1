"""Strict devices tell small programs with one defect each, which CUDA may punish, from their twins without it.

A defect shows as an error of the race detector, or as garbage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.pinned import empty_host
from bigmodel.errors import RaceError

device = torch.device("virtual", 0)


@pytest.fixture(autouse=True, params=["computed at launch", "computed late"])
def late_compute(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "computed late")


@pytest.fixture(autouse=True, params=[None, 0, 1])
def seed(request: pytest.FixtureRequest, late_compute: bool) -> Iterator[int | None]:
    virtual.enable(count=2, strict=True, seed=request.param, late_compute=late_compute)
    yield request.param
    try:
        synchronize()
    finally:
        kept.clear()
        virtual.races()
        virtual.disable()


kept: list[torch.Tensor] = []
"""Memory that streams share: it is freed after all of them have finished."""


def synchronize() -> None:
    torch.get_device_module("virtual").synchronize()


def pinned(value: float, size: int = 8) -> torch.Tensor:
    return empty_host(4 * size, pin=True).view(torch.float32).fill_(value)


def filled(value: float, size: int = 8) -> torch.Tensor:
    kept.append(torch.full((size,), float(value), device=device))
    return kept[-1]


def side_stream() -> virtual.Stream:
    side = virtual.Stream(device)
    side.wait_stream(virtual.current_stream(device))
    return side


def expect_race(program: Callable[[], object], match: str) -> None:
    with pytest.raises(RaceError, match=match):
        program()
    assert virtual.races()


@pytest.mark.parametrize("on_side_stream", [False, True])
@pytest.mark.parametrize("wait", [False, True])
def test_staging_memory_is_filled_again_after_a_wait_for_its_copy(wait: bool, on_side_stream: bool) -> None:
    targets, staging = [filled(0), filled(0)], pinned(0)
    copying = side_stream() if on_side_stream else virtual.current_stream(device)

    def program() -> list[list[float]]:
        for number, target in enumerate(targets):
            staging.fill_(number)
            with virtual.stream(copying):
                target.copy_(staging, non_blocking=True)
                event = copying.record_event()
            if wait:
                event.synchronize()
        virtual.current_stream(device).wait_event(event)
        return [target.tolist() for target in targets]

    if wait:
        assert program() == [[0.0] * 8, [1.0] * 8]
    else:
        expect_race(program, "pinned memory was written to")


@pytest.mark.parametrize("new_target", [False, True])
@pytest.mark.parametrize("wait", [False, True])
def test_what_is_copied_with_its_strides_is_read_from_pinned_memory_itself(wait: bool, new_target: bool) -> None:
    source = pinned(1, 16).view(4, 4).t()
    target = filled(0, 16).view(4, 4).t()

    def program() -> torch.Tensor:
        copied = source.to(device, non_blocking=True) if new_target else target.copy_(source, non_blocking=True)
        if wait:
            synchronize()
        source.fill_(2)
        return copied.cpu()

    if wait:
        assert program().eq(1).all()
    else:
        expect_race(program, "pinned memory was written to")


def test_what_is_copied_to_other_strides_leaves_pinned_memory_first() -> None:
    """PyTorch makes the source contiguous on the host, in memory that is not pinned: that copy holds the host."""
    source, target = pinned(1, 16).view(4, 4).t(), filled(0, 16).view(4, 4)
    target.copy_(source, non_blocking=True)
    source.fill_(2)
    assert target.cpu().eq(1).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_what_comes_to_the_host_has_arrived_when_it_was_waited_for(transposed: bool, seed: int | None) -> None:
    values = filled(3, 16).view(4, 4)
    arrived = (values.t() if transposed else values).to("cpu", non_blocking=True)
    if seed is None:
        assert not arrived.eq(3).any()
    virtual.current_stream(device).synchronize()
    assert arrived.eq(3).all()


def test_pinned_memory_may_be_the_target_of_one_copy_and_the_source_of_the_next() -> None:
    staging, targets, side, other = pinned(0), [filled(0), filled(0)], side_stream(), side_stream()
    values = filled(3)
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        staging.copy_(values, non_blocking=True)
        targets[0].copy_(staging, non_blocking=True)
    other.wait_stream(side)
    with virtual.stream(other):
        targets[1].copy_(staging, non_blocking=True)
    virtual.current_stream(device).wait_stream(other)
    assert [target.tolist() for target in targets] == [[3.0] * 8] * 2


def test_pinned_memory_is_no_source_while_a_copy_of_another_stream_arrives_in_it() -> None:
    staging, target, side = pinned(0), filled(0), side_stream()
    staging.copy_(filled(3), non_blocking=True)
    with virtual.stream(side):
        expect_race(lambda: target.copy_(staging, non_blocking=True), "no event orders after")


def test_memory_that_the_allocator_asks_for_gives_the_program_no_order(late_compute: bool) -> None:
    """It looks whether the users of freed memory have finished; the program has not."""
    virtual.enable(count=1, strict=True, caching=virtual.Caching(), late_compute=late_compute)
    shared, memory, side = filled(1), torch.zeros(8, device=device), side_stream()
    memory.record_stream(side)
    with virtual.stream(side):
        memory.sum()
        shared.add_(1)
    del memory
    for _ in range(8):
        torch.zeros(8, device=device)
    expect_race(shared.sum, "aten.sum")


def test_a_stream_that_is_asked_often_enough_has_finished() -> None:
    filled(0).copy_(pinned(1), non_blocking=True)
    stream = virtual.current_stream(device)
    asked = [stream.query() for _ in range(4)]
    assert asked == sorted(asked)
    assert asked[-1]


def test_the_time_between_events_is_known_when_both_have_passed(seed: int | None) -> None:
    begin, end = virtual.Event(enable_timing=True), virtual.Event(enable_timing=True)
    begin.record()
    filled(1).add_(1)
    end.record()
    if seed is None:
        with pytest.raises(RuntimeError, match="must be completed"):
            begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) >= 0


def test_events_that_are_not_timed_or_not_recorded_tell_no_time() -> None:
    untimed = virtual.Event()
    untimed.record()
    synchronize()
    with pytest.raises(RuntimeError, match="enable_timing"):
        untimed.elapsed_time(untimed)
    unrecorded = virtual.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="must be recorded"):
        unrecorded.elapsed_time(unrecorded)


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("how", ["computes", "copies"])
def test_memory_that_another_stream_uses_is_freed_after_it_was_told(how: str, record: bool) -> None:
    memory, side, source = torch.zeros(8, device=device), side_stream(), pinned(1)
    if record:
        memory.record_stream(side)
    with virtual.stream(side):
        memory.copy_(source, non_blocking=True) if how == "copies" else memory.add_(1)
    del memory
    assert len(virtual.races()) == (0 if record else 1)


def test_values_of_inference_mode_are_awaited_outside_it_too() -> None:
    with torch.inference_mode():
        values, side = torch.ones(8, device=device), side_stream()
        values.record_stream(side)
        with virtual.stream(side):
            values.mul_(2)
    expect_race(values.cpu, "aten.mul_")
    virtual.current_stream(device).wait_stream(side)
    before = virtual.host_waits()
    assert values.cpu().tolist() == [2.0] * 8
    assert virtual.host_waits().since(before).copies_to_host == 1


def arrival(staging: torch.Tensor, value: float, stream: virtual.Stream) -> None:
    """Copy a value to pinned memory on a stream, without waiting."""
    with virtual.stream(stream):
        staging.copy_(filled(value), non_blocking=True)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_copy_from_memory_that_another_arrives_in_tells_the_host_nothing(
    transposed: bool, blocking: bool, seed: int | None
) -> None:
    staging, target = pinned(0, 16).view(4, 4), filled(0, 16).view(4, 4)
    staging.copy_(filled(3, 16).view(4, 4), non_blocking=True)
    (target.t() if transposed else target).copy_(staging, non_blocking=not blocking)
    if seed is None:
        assert staging.eq(3).all() == blocking
    assert target.cpu().eq(3).all()
    assert staging.eq(3).all()


def test_what_has_come_to_the_host_without_a_wait_may_go_back_on_the_same_stream(seed: int | None) -> None:
    arriving = filled(3).to("cpu", non_blocking=True)
    back = arriving.to(device, non_blocking=True)
    if seed is None:
        assert not arriving.eq(3).any()
    assert back.tolist() == [3.0] * 8


def test_parts_that_arrive_are_read_with_what_lies_between_them() -> None:
    staging, target = pinned(1, 8), filled(0)
    staging[2:4].copy_(filled(3, 2), non_blocking=True)
    staging[5:6].copy_(filled(5, 1), non_blocking=True)
    target[1:].copy_(staging[1:], non_blocking=True)
    assert target.tolist() == [0.0, 1.0, 3.0, 3.0, 1.0, 5.0, 1.0, 1.0]


def test_pinned_memory_is_read_and_written_by_copies_of_one_stream_in_order() -> None:
    staging, targets = pinned(1), [filled(0), filled(0)]
    for target, value in zip(targets, (3, 4)):
        target.copy_(staging, non_blocking=True)
        arrival(staging, value, virtual.current_stream(device))
    synchronize()
    assert [target.tolist() for target in targets] == [[1.0] * 8, [3.0] * 8]
    assert staging.eq(4).all()


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("before", ["reads", "writes"])
def test_a_copy_to_pinned_memory_comes_after_those_of_other_streams_that_use_it(before: str, wait: bool) -> None:
    staging, target, values, side = pinned(1), filled(0), filled(4), side_stream()
    if before == "reads":
        target.copy_(staging, non_blocking=True)
    else:
        arrival(staging, 3, virtual.current_stream(device))
    if wait:
        side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        if not wait:
            expect_race(lambda: staging.copy_(values, non_blocking=True), "no event orders")
            return
        staging.copy_(values, non_blocking=True)
    side.synchronize()
    assert staging.eq(4).all()


@pytest.mark.parametrize("wait", [False, True])
def test_pinned_memory_that_a_copy_arrives_in_and_another_reads_is_written_after_a_wait(wait: bool) -> None:
    staging, target = pinned(0), filled(0)
    staging.copy_(filled(3), non_blocking=True)
    target.copy_(staging, non_blocking=True)
    if wait:
        synchronize()
    staging.fill_(7)
    try:
        stays = target.tolist() == [3.0] * 8 and bool(staging.eq(7).all())
    except RaceError:
        stays = False
    assert stays == wait


@pytest.mark.slow
def test_a_process_that_is_forked_after_a_device_was_used_cannot_use_it() -> None:
    kept.append(filled(1) + 1)
    child = os.fork()
    if child == 0:
        try:
            filled(1).add_(1)
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) and virtual_module()._is_in_bad_fork() else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (filled(1) + 1).tolist() == [2.0] * 8
    assert not virtual_module()._is_in_bad_fork()


def virtual_module() -> Any:
    return torch.get_device_module("virtual")


@pytest.mark.parametrize("wait", [False, True])
def test_lists_are_copied_from_and_to_the_host_by_the_rules_of_single_copies(wait: bool, seed: int | None) -> None:
    staging, targets, arriving = [pinned(1), pinned(2)], [filled(0), filled(0)], [pinned(0), pinned(0)]
    torch._foreach_copy_(targets, staging, non_blocking=True)
    torch._foreach_copy_(arriving, targets, non_blocking=True)
    if wait:
        synchronize()
    if wait or seed is None:
        assert [each.eq(value).all().item() for each, value in zip(arriving, (1, 2))] == [wait, wait]
    synchronize()
    assert [each.tolist() for each in arriving] == [[1.0] * 8, [2.0] * 8]


def test_pinned_memory_of_a_list_is_written_to_after_a_wait_for_its_copy() -> None:
    staging, targets = [pinned(1), pinned(2)], [filled(0), filled(0)]
    torch._foreach_copy_(targets, staging, non_blocking=True)
    staging[1].fill_(7)
    expect_race(lambda: torch.cat(targets).tolist(), "pinned memory was written to")


@pytest.mark.parametrize("into", ["out", "in place"])
def test_outputs_that_are_named_are_written_and_arguments_that_are_named_are_read(into: str) -> None:
    values, order, side = filled(1), torch.zeros(8, dtype=torch.int64, device=device), virtual.Stream(device)
    kept.append(order)
    synchronize()
    with virtual.stream(side):
        if into == "out":
            torch.add(values, values, out=filled(0))
            torch.add(filled(1), 1, out=values)
        else:
            order.add_(1)
    if into == "out":
        expect_race(values.sum, "aten.add.out")
    else:
        expect_race(lambda: torch.searchsorted(values, values, sorter=order), "aten.add_")


def test_a_mask_reads_all_of_what_it_is_taken_from() -> None:
    values, mask, side = filled(1), filled(1).bool(), virtual.Stream(device)
    kept.append(mask)
    synchronize()
    with virtual.stream(side):
        values.add_(1)
    expect_race(lambda: values[mask], "aten.add_")


def test_a_copy_to_other_strides_comes_after_the_work_of_its_stream() -> None:
    target = filled(0, 16).view(4, 4)
    target.add_(1)
    target.t().copy_(pinned(3, 16).view(4, 4), non_blocking=True)
    assert target.cpu().eq(3).all()


def test_the_host_has_waited_for_what_a_blocking_copy_reads() -> None:
    values, side = filled(1), virtual.Stream(device)
    assert values.cpu().eq(1).all()
    with virtual.stream(side):
        values.add_(1)
    side.synchronize()
    assert values.cpu().eq(2).all()


def test_memory_that_another_copy_arrives_in_next_was_not_written_to_before() -> None:
    staging, target = pinned(1), filled(0)
    target.copy_(staging, non_blocking=True)
    staging.fill_(7)
    staging.copy_(filled(3), non_blocking=True)
    expect_race(target.sum, "pinned memory was written to")


def test_a_time_is_unknown_while_its_first_event_has_not_passed(seed: int | None) -> None:
    begin, end, side = virtual.Event(enable_timing=True), virtual.Event(enable_timing=True), virtual.Stream(device)
    with virtual.stream(side):
        filled(0).copy_(pinned(1), non_blocking=True)
        begin.record()
    end.record()
    end.synchronize()
    if seed is None:
        with pytest.raises(RuntimeError, match="must be completed"):
            begin.elapsed_time(end)
    side.synchronize()
    begin.elapsed_time(end)


def test_what_the_allocator_takes_for_finished_has_been_done(seed: int | None) -> None:
    target, side = filled(0), side_stream()
    with virtual.stream(side):
        target.copy_(pinned(1), non_blocking=True)
        event = side.record_event()
    asked = [event.has_passed() for _ in range(4)]
    assert asked[-1]
    assert target.held.eq(1).all()  # type: ignore[attr-defined]
    virtual.current_stream(device).wait_event(event)
