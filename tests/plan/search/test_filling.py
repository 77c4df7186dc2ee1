"""Options of a group, whether placements fit, the greedy placement, and the caps that balance it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.plan import balanced_caps, plan
from bigmodel.plan.search.filling import (
    Filling,
    fill_around,
    fill_in_order,
    may_hold,
    options_of,
    place_away,
    place_greedily,
)
from bigmodel.plan.search.items import Capacity, GroupPlacement, Item

from ...profile.models import tiny_llama
from .groups import fill, group, placement_of

STREAMED, RESIDENT, COMPUTED = ("cpu", 0), (0, 0), ("cpu", "cpu")


def test_a_group_may_be_resident_on_each_accelerator_or_streamed_to_the_main_one() -> None:
    assert options_of(group(4), Capacity({0: 9, 1: 9, "cpu": 9}, main_device=1)) == [
        (0, 0),
        (1, 1),
        ("cpu", 1),
        ("disk", 1),
    ]


def test_the_host_computes_a_group_beside_accelerators_only_with_host_compute() -> None:
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


def test_weights_count_on_the_storage_device_and_caches_on_the_execution_device() -> None:
    items = [group(4, working=3), group(4, working=3, slot=2)]
    for accelerator, host, fits in ((12, 4, True), (11, 4, False), (12, 3, False)):
        placement = placement_of(items, Capacity({0: accelerator, "cpu": host}), [RESIDENT, STREAMED])
        assert (placement is not None) is fits


@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), min_size=1, max_size=8),
    devices=st.lists(st.sampled_from([0, 1, "cpu"]), min_size=8, max_size=8),
    streamed=st.booleans(),
)
def test_a_resident_group_is_added_where_the_device_keeps_to_its_budget_with_it(
    sizes: list[tuple[int, int, bool]], devices: list[Any], streamed: bool
) -> None:
    items = [group(4), *(replace(group(size, working=working), units=()) if bare else group(size, working=working)
             for size, working, bare in sizes)]  # fmt: skip
    capacity = Capacity({0: 12, 1: 9, "cpu": 14}, activations=2)
    tried, added = Filling(items, capacity), Filling(items, capacity)
    for filling in (tried, added):
        filling.add(0, STREAMED if streamed else RESIDENT)
    for index, device in enumerate(devices[: len(sizes)], 1):
        added.add(index, (device, device))
        fits = added.usage.excess(device, capacity.budgets) <= 0
        if not fits:
            added.remove(index)
        assert tried.try_add(index, (device, device)) is fits
        assert tried.options == added.options
        assert tried.usage.over(capacity.budgets) == added.usage.over(capacity.budgets)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), min_size=1, max_size=8),
    alike=st.sampled_from([(0, 0), (1, 1), ("cpu", 0), ("cpu", 1), ("disk", 0), ("cpu", "cpu"), ("disk", "cpu")]),
    other=st.sampled_from([STREAMED, RESIDENT, COMPUTED]),
)
def test_groups_that_are_added_together_take_what_they_take_one_by_one(
    sizes: list[tuple[int, int, bool]], alike: tuple[Any, Any], other: tuple[Any, Any]
) -> None:
    items = [group(4), *(replace(group(size, working=working), units=()) if bare else group(size, working=working)
             for size, working, bare in sizes)]  # fmt: skip
    capacity = Capacity({0: 12, 1: 9, "cpu": 14}, activations=2)
    together, alone = Filling(items, capacity), Filling(items, capacity)
    for filling in (together, alone):
        filling.add(0, other)
    together.add_all(range(1, len(items)), alike)
    for index in range(1, len(items)):
        alone.add(index, alike)
    assert together.options == alone.options
    for device in (0, 1, "cpu", "disk"):
        assert together.usage.total(device) == alone.usage.total(device)
        assert together.runs(device) is alone.runs(device)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sets(st.integers(0, 7)), st.integers(0, 20))
def test_nothing_fits_where_the_accelerators_may_not_hold_what_stays(
    sizes: list[int], away: set[int], budget: int
) -> None:
    items = [group(size) for size in sizes]
    capacity = Capacity({0: budget, 1: 9, "cpu": 100})
    streamed = dict.fromkeys(sorted(index for index in away if index < len(items)), 0)
    stay = (index for index in range(len(items)) if index not in streamed)
    assert may_hold(items, capacity, stay) or place_away(items, capacity, streamed) is None


def test_activations_are_reserved_on_every_execution_device() -> None:
    items = [group(4), group(4)]
    for accelerator, host, fits in ((6, 6, True), (5, 6, False), (6, 5, False)):
        capacity = Capacity({0: accelerator, "cpu": host}, activations=2)
        assert (placement_of(items, capacity, [RESIDENT, COMPUTED]) is not None) is fits


def test_groups_on_disk_that_the_host_computes_need_a_read_ahead_window() -> None:
    items, from_disk = [group(4), group(4)], [("disk", "cpu")] * 2
    assert placement_of(items, Capacity({"cpu": 9}, activations=1), from_disk) is not None
    assert placement_of(items, Capacity({"cpu": 8}, activations=1), from_disk) is None


def test_the_disk_is_unlimited_unless_it_has_a_budget() -> None:
    from_disk = [("disk", 0)]
    assert placement_of([group(4)], Capacity({0: 4}), from_disk) is not None
    assert placement_of([group(4)], Capacity({0: 4, "disk": 3}), from_disk) is None


def test_the_host_is_the_main_device_if_no_accelerator_runs_anything() -> None:
    placement = placement_of([group(4)], Capacity({0: 4, "cpu": 4}, host_compute=True), [COMPUTED])
    assert placement is not None
    assert placement.main == "cpu"


def test_neighbours_stay_together() -> None:
    assert fill([4, 4, 4, 4], [8, 8]) == ([[0, 1], [2, 3]], [])


def test_items_after_one_that_does_not_fit_are_placed() -> None:
    assert fill([100, 1, 1], [10, None]) == ([[], [0, 1, 2]], [])
    assert fill([100, 1, 1], [10, 5]) == ([[1, 2], []], [0])


def test_free_memory_of_earlier_devices_is_used_at_the_end() -> None:
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


def items(*sizes: int, working: int = 0) -> list[Item]:
    return [group(size, working) for size in sizes]


def placed(sizes: list[Item], **capacity: object) -> GroupPlacement:
    found = place_greedily(sizes, Capacity(**capacity))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_model_that_fits_is_resident_and_needs_no_slots() -> None:
    found = placed(items(10, 10), budgets={0: 20, "cpu": 100})
    assert found.storage == found.execution == (0, 0)
    assert found.slots == 0


def test_units_that_do_not_fit_are_streamed_through_two_slots() -> None:
    found = placed(items(10, 10, 10, 10), budgets={0: 30, "cpu": 100})
    assert found.storage == (0, "cpu", "cpu", "cpu")
    assert found.execution == (0, 0, 0, 0)
    assert (found.main, found.slots, found.slot_bytes) == (0, 2, 10)


def test_one_streamed_unit_needs_one_slot() -> None:
    sizes = [group(10, slot=3), group(10, slot=3)]
    found = placed(sizes, budgets={0: 13, "cpu": 100})
    assert (found.storage, found.slots, found.slot_bytes) == ((0, "cpu"), 1, 3)


def test_the_largest_units_are_resident_if_that_makes_slots_small_enough() -> None:
    found = placed(items(50, 10, 10, 10), budgets={0: 70, "cpu": 100})
    assert found.storage[0] == 0
    assert found.slot_bytes == 10


def test_units_beyond_the_hosts_budget_are_on_disk() -> None:
    found = placed(items(10, 10, 10, 10), budgets={0: 30, "cpu": 22})  # half of which is for staging
    assert found.storage == (0, "cpu", "disk", "disk")


def test_a_second_accelerator_takes_units_beyond_the_firsts_budget() -> None:
    found = placed(items(10, 10, 10, 10), budgets={0: 20, 1: 20, "cpu": 100})
    assert found.storage == (0, 0, 1, 1)


def test_budgets_of_zero_and_gaps_in_device_numbers_are_accepted() -> None:
    found = placed(items(10, 10), budgets={0: 0, 1: 0, 3: 25, "cpu": 0})
    assert found.storage == (3, 3)
    assert found.main == 3


def test_accelerators_too_small_for_slots_are_not_used() -> None:
    found = placed(items(10, 10), budgets={0: 5, "cpu": 100})
    assert found.storage == found.execution == ("cpu", "cpu")
    assert found.main == "cpu"


def test_a_unit_too_large_for_a_slot_runs_on_the_cpu_with_host_compute() -> None:
    sizes = items(1000, *[40] * 10)
    found = placed(sizes, budgets={0: 500, "cpu": 5000}, host_compute=True)
    assert found.storage == ("cpu", *[0] * 10)
    assert found.execution == ("cpu", *[0] * 10)


def test_pinned_items_are_on_the_main_device() -> None:
    sizes = [*items(10, 10, 10), replace(group(4), pinned=True)]
    found = placed(sizes, budgets={0: 24, 1: 20, "cpu": 100}, main_device=0)
    assert found.storage[3] == 0


def test_working_memory_counts_on_the_execution_device() -> None:
    streamed = items(10, 10, 10, working=5)
    found = placed(streamed, budgets={0: 35, "cpu": 100})
    assert found.storage == ("cpu", "cpu", "cpu")
    assert place_greedily(streamed, Capacity({0: 34, "cpu": 29, "disk": 0})) is None


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=12),
    st.lists(st.integers(0, 120), max_size=2),
    st.integers(0, 200),
    st.integers(0, 20),
)
def test_no_budget_is_passed(
    sizes: list[tuple[int, int]], accelerators: list[int], host: int, activations: int
) -> None:
    things = [group(weights, working) for weights, working in sizes]
    budgets: dict[int | str, int] = {**dict(enumerate(accelerators)), "cpu": host}
    found = place_greedily(things, Capacity(budgets, activations))
    if found is None:
        return
    used: dict[int | str, int] = {}
    for item, storage, execution in zip(things, found.storage, found.execution, strict=True):
        used[storage] = used.get(storage, 0) + item.weights
        used[execution] = used.get(execution, 0) + item.working
    for device in {key for key in found.execution if key != "disk"}:
        used[device] = used.get(device, 0) + (activations if activations else 0)
    used[found.main] = used.get(found.main, 0) + found.slots * found.slot_bytes
    for device, budget in budgets.items():
        assert used.get(device, 0) <= budget
    streamed = [
        item for item, storage, execution in zip(things, found.storage, found.execution, strict=True)
        if execution not in ("cpu", storage)
    ]  # fmt: skip
    assert found.slots == min(len(streamed), 2)
    assert all(item.slot_bytes <= found.slot_bytes for item in streamed)


def test_caps_leave_room_for_the_last_items_behind_those_before_them() -> None:
    assert balanced_caps([2, 20, 20, 20, 20, 1, 2], [99] * 4) == [23] * 4
    assert balanced_caps([2, 20, 20, 20, 20, 1, 2], [22] * 4) == [22] * 4  # where that is too much, all fit at least


@pytest.mark.slow
def test_a_balanced_model_goes_through_the_devices_once() -> None:
    made = plan(tiny_llama(num_hidden_layers=4), {**dict.fromkeys(range(4), 2**26), "cpu": 2**30}, "balanced")
    places = [part.device for part in made.parts]
    assert places == sorted(places, key=str)
    assert set(places) == {0, 1, 2, 3}


def test_unequal_devices_are_capped_by_their_capacities() -> None:
    assert balanced_caps([10] * 10, [20, 1000]) == [20, 80]


def test_low_zero_gives_the_first_device_only_items_that_do_not_fit_the_others() -> None:
    assert balanced_caps([10] * 10, [1000, 60, 30], low_zero=True) == [10, 60, 30]


def test_budgets_are_unchanged_if_the_model_does_not_fit() -> None:
    assert balanced_caps([10] * 10, [20, 30]) == [20, 30]


def test_one_large_embedding_does_not_leave_the_other_devices_empty() -> None:
    costs = [100, *[10] * 10]
    assert balanced_caps(costs, [150, 150]) == [100, 100]


@given(st.lists(st.integers(1, 50), min_size=1), st.lists(st.integers(1, 400), min_size=1, max_size=4), st.booleans())
def test_items_that_fit_the_capacities_fit_the_caps(costs: list[int], capacities: list[int], low_zero: bool) -> None:
    caps = balanced_caps(costs, capacities, low_zero)
    assert all(cap <= capacity for cap, capacity in zip(caps, capacities, strict=True))
    assert fill(costs, caps)[1] == fill(costs, capacities)[1]


def test_caps_leave_the_main_device_what_must_be_there() -> None:
    assert balanced_caps([40, 10, 10, 10, 10], [1000, 1000], fixed=[0, 4]) == [50, 50]
    assert balanced_caps([10, 10, 10, 10, 40], [1000, 1000], fixed=[4], main=1) == [40, 40]
    assert balanced_caps([40, 10, 40], [1000, 1000], low_zero=True, fixed=[0, 2]) == [80, 10]


def test_a_group_whose_weights_others_read_is_on_no_accelerator_but_the_main_one() -> None:
    lending = replace(group(4), lends=True)
    options = options_of(lending, Capacity({0: 9, 1: 9, "cpu": 9}, main_device=1))
    assert options == [(1, 1), ("cpu", 1), ("disk", 1)]
    placement = place_greedily([group(4), group(4), lending], Capacity({0: 8, 1: 8, "cpu": 0, "disk": 0}))
    assert placement is not None
    assert placement.storage == (0, 1, 0)


GROUPS = [
    group(30, working=4),
    group(30, working=4),
    group(70),
    replace(group(20, working=1), lends=True),
    replace(group(25), units=()),
]


@given(
    st.lists(st.sampled_from(GROUPS), max_size=12),
    st.lists(st.integers(1, 160), min_size=1, max_size=4),
    st.integers(0, 40),
    st.sets(st.integers(0, 11)),
)
def test_groups_are_placed_as_if_each_was_tried_everywhere(
    groups: list[Item], budgets: list[int], activations: int, streamed: set[int]
) -> None:
    capacity = Capacity({**dict(enumerate(budgets)), "cpu": 1000}, activations=activations)
    away = dict.fromkeys((index for index in streamed if index < len(groups)), 0)
    stay = [index for index in range(len(groups)) if index not in away]
    filling, left = fill_around(groups, capacity, away, stay)
    plain = Filling(groups, capacity)
    for index in away:
        plain.add(index, ("cpu", 0))
    lending = {index for index in stay if groups[index].lends and len(budgets) > 1}
    refused = [index for index in stay if index in lending and not plain.try_add(index, (0, 0))]
    others = [index for index in stay if index not in lending]
    refused += fill_in_order(others, len(budgets), lambda index, at: plain.try_add(index, (at, at)))
    assert (filling.options, left) == (plain.options, refused)
    assert all(filling.usage.total(key) == plain.usage.total(key) for key in capacity.budgets)
