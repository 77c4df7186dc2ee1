"""Options of a group, and whether placements fit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bigmodel.plan.search.filling import options_of
from bigmodel.plan.search.items import Capacity, GroupPlacement

from .groups import fill, group, placement_of

STREAMED, RESIDENT, COMPUTED = ("cpu", 0), (0, 0), ("cpu", "cpu")


def test_a_group_may_be_resident_on_each_accelerator_or_streamed_to_the_main_one() -> None:
    assert options_of(group(4), Capacity({0: 9, 1: 9, "cpu": 9}, main_device=1)) == [
        (0, 0),
        (1, 1),
        ("cpu", 1),
        ("disk", 1),
    ]


def test_the_host_computes_a_group_beside_accelerators_only_where_that_is_allowed() -> None:
    host = [("cpu", "cpu"), ("disk", "cpu")]
    assert options_of(group(4), Capacity({0: 9}, host_compute=True))[-2:] == host
    assert not set(host) & set(options_of(group(4), Capacity({0: 9})))
    assert options_of(group(4), Capacity({"cpu": 9})) == host


def test_a_pinned_group_has_no_choice() -> None:
    assert options_of(replace(group(4), pinned=True), Capacity({0: 9, 1: 9}, host_compute=True)) == [(0, 0)]


def test_streamed_groups_take_turns_in_slots_of_the_largest() -> None:
    items = [group(4), group(6), group(5)]
    capacity = Capacity({0: 12, "cpu": 15})
    assert placement_of(items, capacity, [STREAMED] * 3) == GroupPlacement(
        ("cpu",) * 3, (0,) * 3, 0, slots=2, slot_bytes=6
    )
    assert placement_of(items, Capacity({0: 11, "cpu": 15}), [STREAMED] * 3) is None
    assert placement_of(items, Capacity({0: 12, "cpu": 14}), [STREAMED] * 3) is None


def test_a_group_takes_its_weights_where_it_is_held_and_its_cache_where_it_runs() -> None:
    items = [group(4, working=3), group(4, working=3, slot=2)]
    for accelerator, host, fits in ((12, 4, True), (11, 4, False), (12, 3, False)):
        placement = placement_of(items, Capacity({0: accelerator, "cpu": host}), [RESIDENT, STREAMED])
        assert (placement is not None) is fits


def test_activations_are_kept_free_wherever_something_runs() -> None:
    items = [group(4), group(4)]
    for accelerator, host, fits in ((6, 6, True), (5, 6, False), (6, 5, False)):
        capacity = Capacity({0: accelerator, "cpu": host}, activations=2)
        assert (placement_of(items, capacity, [RESIDENT, COMPUTED]) is not None) is fits


def test_what_the_host_computes_from_disk_is_read_through_a_window_of_its_memory() -> None:
    items, from_disk = [group(4), group(4)], [("disk", "cpu")] * 2
    assert placement_of(items, Capacity({"cpu": 9}, activations=1), from_disk) is not None
    assert placement_of(items, Capacity({"cpu": 8}, activations=1), from_disk) is None


def test_the_disk_has_no_end_unless_one_is_given() -> None:
    from_disk = [("disk", 0)]
    assert placement_of([group(4)], Capacity({0: 4}), from_disk) is not None
    assert placement_of([group(4)], Capacity({0: 4, "disk": 3}), from_disk) is None


def test_where_no_accelerator_runs_anything_the_host_is_the_main_device() -> None:
    placement = placement_of([group(4)], Capacity({0: 4, "cpu": 4}, host_compute=True), [COMPUTED])
    assert placement is not None
    assert placement.main == "cpu"


def test_neighbours_stay_together() -> None:
    assert fill([4, 4, 4, 4], [8, 8]) == ([[0, 1], [2, 3]], [])


def test_a_huge_item_pushes_nothing_else_away() -> None:
    assert fill([100, 1, 1], [10, None]) == ([[], [0, 1, 2]], [])
    assert fill([100, 1, 1], [10, 5]) == ([[1, 2], []], [0])


def test_room_left_behind_gets_a_second_chance() -> None:
    assert fill([80, 5, 5, 5, 15], [16, 96]) == ([[4], [0, 1, 2, 3]], [])


@given(st.lists(st.integers(0, 50)), st.lists(st.integers(0, 100), max_size=4))
def test_no_bin_overflows_and_every_item_is_accounted_for(costs: list[int], capacities: list[int]) -> None:
    placed, passed = fill(costs, list(capacities))
    assert sorted([index for bin_ in placed for index in bin_] + passed) == list(range(len(costs)))
    for bin_, capacity in zip(placed, capacities, strict=True):
        assert sum(costs[index] for index in bin_) <= capacity
    for index in passed:
        for bin_, capacity in zip(placed, capacities, strict=True):
            assert sum(costs[i] for i in bin_) + costs[index] > capacity
