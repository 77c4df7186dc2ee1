"""Work of two streams that no event orders is reported, with both places; what is ordered is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.pinned import empty_host
from bigmodel.errors import RaceError

device = torch.device("virtual", 0)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    virtual.enable(count=2, strict=True, late_compute=False)
    yield
    torch.get_device_module("virtual").synchronize()
    kept.clear()
    virtual.disable()


kept: list[torch.Tensor] = []
"""Memory that a test shares between streams: it is freed after all of them have finished."""


def side_stream() -> virtual.Stream:
    return virtual.Stream(device)


def on_the_device(size: int = 8) -> torch.Tensor:
    kept.append(torch.zeros(size, device=device))
    return kept[-1]


def expect_race(match: str) -> None:
    """Take note of the only race so far, which was raised before."""
    (found,) = virtual.races()
    assert match in found


def test_a_write_beside_a_read_is_a_race_and_both_places_are_named() -> None:
    x, side = on_the_device(), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        x.sum()
    with pytest.raises(RaceError, match=r"aten.add_.*test_races.py:\d+ in test_a_write.*aten.sum.*test_races.py:\d+"):
        x.add_(1)
    expect_race("aten.add_")


def test_a_read_of_what_another_stream_writes_is_a_race() -> None:
    x, side = on_the_device(), side_stream()
    with pytest.raises(RaceError, match="reads bytes 0 to 32 of 32"), virtual.stream(side):
        x.sum()
    expect_race("aten.sum")


def test_two_reads_are_none() -> None:
    x, side = on_the_device(), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        x.sum()
    x.sum()


def test_other_bytes_of_the_same_memory_are_none() -> None:
    x, side = on_the_device(), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        x[:4].add_(1)
    x[4:].add_(1)
    with pytest.raises(RaceError, match="bytes 12 to 20"):
        x[3:5].add_(1)
    expect_race("aten.add_")


def test_an_event_orders_what_was_launched_before_it_and_nothing_later() -> None:
    x, side = on_the_device(), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        x.add_(1)
        event = side.record_event()
    event.wait()
    x.sum()
    event = virtual.current_stream(device).record_event()
    x.add_(1)
    with pytest.raises(RaceError), virtual.stream(side):
        side.wait_event(event)
        x.sum()
    expect_race("aten.sum")


def test_order_is_passed_on_from_stream_to_stream() -> None:
    x, one, two = on_the_device(), side_stream(), side_stream()
    one.wait_stream(virtual.current_stream(device))
    with virtual.stream(one):
        x.add_(1)
    two.wait_stream(one)
    virtual.current_stream(device).wait_stream(two)
    x.sum()


@pytest.mark.parametrize("wait", ["event", "stream", "device", "query"])
def test_the_host_orders_what_it_has_waited_for(wait: str) -> None:
    x, side = on_the_device(), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        x.add_(1)
    event = side.record_event()
    if wait == "event":
        event.synchronize()
    elif wait == "stream":
        side.synchronize()
    elif wait == "device":
        torch.get_device_module("virtual").synchronize()
    else:
        while not event.query():
            pass
    x.sum()


def test_a_blocking_copy_to_the_host_waits_for_its_stream_only() -> None:
    x, y, side = on_the_device(), on_the_device(), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        x.add_(1)
        x.cpu()
        y.add_(1)
    x.sum()
    with pytest.raises(RaceError):
        y.sum()
    expect_race("aten.sum")


def test_all_threads_share_the_default_stream() -> None:
    x = on_the_device()
    thread = threading.Thread(target=x.add_, args=(1,))
    thread.start()
    thread.join()
    assert x.tolist() == [1.0] * 8


def test_a_current_stream_is_that_of_one_thread() -> None:
    found: list[virtual.Stream] = []
    with virtual.stream(side_stream()):
        thread = threading.Thread(target=lambda: found.append(virtual.current_stream(device)))
        thread.start()
        thread.join()
    assert found == [virtual.default_stream(device)]


def test_memory_is_ordered_with_its_last_owner_on_its_own_stream_only() -> None:
    """Fresh memory may be what work launched before still uses: another stream must wait, too."""
    side = side_stream()
    on_the_device().add_(1)
    memory = torch.empty(8, device=device)
    kept.append(memory)
    with pytest.raises(RaceError, match="allocation"), virtual.stream(side):
        memory.zero_()
    expect_race("allocation")


def test_memory_freed_under_another_stream_is_reported() -> None:
    x, side = torch.zeros(8, device=device), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        x.sum()
    del x
    expect_race("freed at")


def test_memory_that_the_stream_was_recorded_for_may_be_freed() -> None:
    x, side = torch.zeros(8, device=device), side_stream()
    x.record_stream(side)
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        x.sum()
    del x


def test_memory_is_freed_after_a_wait_for_who_used_it() -> None:
    x, side = torch.zeros(8, device=device), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        x.sum()
    virtual.current_stream(device).wait_stream(side)
    del x


def test_a_gather_reads_the_rows_that_it_asks_for() -> None:
    """Other rows may be written meanwhile, as a cache of experts is."""
    table, side = on_the_device(32).view(4, 8), side_stream()
    side.wait_stream(virtual.current_stream(device))
    rows = torch.tensor([1, 3], device=device)
    with virtual.stream(side):
        table[0].add_(1)
    torch.nn.functional.embedding(rows, table)
    table[rows]
    table.index_select(0, rows)
    with pytest.raises(RaceError):
        table[torch.tensor([0], device=device)]
    expect_race("aten.index")


@pytest.mark.parametrize(("written", "races"), [(0, False), (2, True), (4, False), (6, True), (7, True)])
def test_rows_that_follow_each_other_are_read_as_one_range(written: int, races: bool) -> None:
    table, side = on_the_device(64).view(8, 8), side_stream()
    side.wait_stream(virtual.current_stream(device))
    rows = torch.tensor([2, 3, 1, -2, 7], device=device)
    with virtual.stream(side):
        table[written].add_(1)
    if not races:
        table[rows]
        assert len(kept[-1]._allocation.history.reads) == 2  # type: ignore[attr-defined]
        return
    with pytest.raises(RaceError):
        table[rows]
    expect_race("aten.index")


def test_rows_with_others_elements_between_them_are_read_alone() -> None:
    """The rows of a part of the columns."""
    table, side = on_the_device(32).view(4, 8), side_stream()
    side.wait_stream(virtual.current_stream(device))
    rows = torch.tensor([1, 2], device=device)
    with virtual.stream(side):
        table[1, 4:].add_(1)
    table[:, :4].index_select(0, rows)
    with pytest.raises(RaceError):
        table[:, 2:6].index_select(0, rows)
    expect_race("aten.index_select")


def test_a_number_is_the_only_row_of_itself() -> None:
    number, rows = torch.tensor(3.0, device=device), torch.tensor([0], device=device)
    assert number.index_select(0, rows).cpu() == 3
    assert number.index_add(0, rows, number).cpu() == 6


def test_a_grouped_product_reads_the_groups_that_have_rows() -> None:
    weights, side = on_the_device(96).view(torch.bfloat16).view(3, 8, 8), side_stream()
    rows, ends = torch.ones(4, 8, device=device, dtype=torch.bfloat16), torch.tensor([0, 2, 4], device=device)
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        weights[0].add_(1)
    torch._grouped_mm(rows, weights, ends.to(torch.int32))
    with pytest.raises(RaceError):
        torch._grouped_mm(rows, weights, (ends + 1).clamp(max=4).to(torch.int32))
    expect_race("grouped_mm")


def test_a_copy_between_devices_is_in_order_with_both() -> None:
    x = on_the_device()
    there = x.to("virtual:1")
    x.add_(1)
    assert there.sum() == 0


def test_operations_that_look_at_no_element_are_none() -> None:
    x, side = on_the_device(), side_stream()
    with virtual.stream(side):
        assert x.view(2, 4).t().detach().shape == (4, 2)
        torch.empty_like(x)


def test_pinned_memory_must_not_be_written_to_while_a_copy_reads_it() -> None:
    source, target = empty_host(8, pin=True).fill_(1), on_the_device(2).view(torch.uint8)
    target.copy_(source, non_blocking=True)
    target.sum()
    source.fill_(2)
    with pytest.raises(RaceError, match="pinned memory was written to before the host has waited"):
        virtual.current_stream(device).synchronize()
    expect_race("pinned memory")


def test_what_nobody_reads_may_be_torn() -> None:
    """A prefetch of weights that are written meanwhile is thrown away."""
    source, target, side = empty_host(8, pin=True).fill_(1), on_the_device(2).view(torch.uint8), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        target.copy_(source, non_blocking=True)
        source.fill_(2)
        target.copy_(source, non_blocking=True)
    virtual.current_stream(device).wait_stream(side)
    assert target.tolist() == [2] * 8


def test_what_is_torn_must_not_be_read() -> None:
    source, target, side = empty_host(8, pin=True).fill_(1), on_the_device(2).view(torch.uint8), side_stream()
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        target.copy_(source, non_blocking=True)
    source.fill_(2)
    virtual.current_stream(device).wait_stream(side)
    with pytest.raises(RaceError, match="torn"):
        target.sum()
    expect_race("torn")


def test_a_simple_accelerator_is_not_checked() -> None:
    virtual.enable(count=1, strict=False)
    with virtual.stream(side_stream()):
        on_the_device().add_(1)
    assert not torch.get_device_module("virtual").has_streams(device)


def test_a_link_of_a_set_speed_makes_a_device_simple() -> None:
    virtual.enable(count=2, strict=True)
    virtual.configure(1, bandwidth=1e12)
    module = torch.get_device_module("virtual")
    assert [module.has_streams(index) for index in range(3)] == [True, False, False]


def test_views_of_memory_that_outlives_its_accelerator_are_no_new_memory() -> None:
    """A prefetch of the last test may be under way when the accelerators of the next one are made."""
    x = on_the_device()
    side = side_stream()
    side.wait_stream(virtual.current_stream(device))
    virtual.disable()
    virtual.enable(count=2, strict=True)
    on_the_device().add_(1)
    with virtual.stream(side):
        x.view(2, 4)[1].add_(1)


def test_reads_before_a_write_are_forgotten() -> None:
    x = on_the_device()
    assert isinstance(x, virtual.VirtualTensor)
    assert x._allocation is not None
    history = x._allocation.history
    assert history is not None
    for begin in range(4):
        x[begin:].sum()
    assert len(history.reads) == 4
    x[2:].add_(1)
    assert {key[1:] for key in history.reads} == {(0, 32), (4, 32)}
    x.add_(1)
    assert not history.reads
