"""The incremental count against a slow recount, and the search's count against the exact evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.limits import READ_AHEAD_BYTES
from bigmodel.plan import read_ahead_window, staging
from bigmodel.plan.memory.assignment import memory_usage
from bigmodel.plan.memory.usage import ExpertCapacity, MemoryUsage, PassingUnit
from bigmodel.plan.result.budgets import Key, is_accelerator
from bigmodel.plan.search.filling import Filling, Option, options_of
from bigmodel.plan.search.items import Capacity, Item, assignment_of, item_of, tie_groups
from bigmodel.profile import Profile, profile_model
from bigmodel.profile.model.experts import RouterChoice

from ...profile.models import tiny_llama

CAPACITY = Capacity({0: 1, 1: 1, "cpu": 1}, host_compute=True)


@cache
def profile() -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=4), context_length=16, new_tokens=2)


def recount(chosen: dict[int, tuple[Item, Option]], device: Key) -> int:
    """Return the bytes of a device, counted from nothing."""
    total = 0
    streamed, viewed, staged = [], [], []
    for item, (storage, execution) in chosen.values():
        (unit,) = item.units
        streams = is_accelerator(execution) and not is_accelerator(storage)
        total += (item.weights if storage == device else 0) + (item.working if execution == device else 0)
        if streams:
            streamed.append(unit)
        if storage == "disk":
            (staged if streams else viewed).append(item.weights)
    if device == CAPACITY.main:
        total += min(len(streamed), CAPACITY.slots) * max((unit.slot for unit in streamed), default=0)
        total += 2 * max((unit.arriving for unit in streamed), default=0)
        total += max((unit.scratch for unit in streamed), default=0)
    return total + (read_ahead_window(viewed) + staging(staged) if device == "cpu" else 0)


steps = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=20
)


@given(steps)
def test_adding_and_removing_groups_equals_a_recount(steps: list[tuple[int, int, int, int, bool]]) -> None:
    items = [
        Item(w, working, (PassingUnit(w + at, (), number * at, number, staged=w, viewed=w),))
        for w, working, number, at, _ in steps
    ]
    filling = Filling(items, CAPACITY)
    present: dict[int, tuple[Item, Option]] = {}
    for index, (_, _, number, position, removes) in enumerate(steps):
        if removes and present:
            gone = list(present)[position % len(present)]
            del present[gone]
            filling.remove(gone)
        else:
            options = options_of(items[index], CAPACITY)
            present[index] = items[index], options[number % len(options)]
            filling.add(index, present[index][1])
        for device in (0, 1, "cpu", "disk"):
            assert filling.usage.total(device) == recount(present, device)


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), min_size=40, max_size=40), st.booleans(), st.sampled_from([None, "int8", "int4"]))
def test_search_and_exact_evaluation_count_the_same_bytes_except_activations(
    numbers: list[int], stream_buffers: bool, offload_dtype: str | None
) -> None:
    of = replace(profile(), offload_dtype=offload_dtype)
    groups = tie_groups(of.units)
    filling = Filling([item_of(group, of, stream_buffers) for group in groups], replace(CAPACITY, budgets=ENOUGH))
    for index, (item, number) in enumerate(zip(filling.items, numbers, strict=False)):
        available = options_of(item, CAPACITY)
        filling.add(index, available[number % len(available)])
    placement = filling.placement()
    assert placement is not None
    exact = memory_usage(of, assignment_of(of, groups, placement, stream_buffers, Capacity(ENOUGH, main_device=0)))
    for device in exact.devices:
        assert filling.usage.total(device) == exact.total(device) - exact.of(device, "activations")


ENOUGH = {0: 10**9, 1: 10**9, "cpu": 10**9}


def test_experts_of_all_streamed_units_share_the_bytes_of_whole_slots() -> None:
    kind, unit = (("up", 10),), PassingUnit(slot=5, experts=(((("up", 10),), 8),))
    usage = MemoryUsage(0, slots=2)
    for count in range(1, 4):
        usage.add_unit(unit, "cpu", 0)
        # One unit alone has one slot; from the second one on two whole units fit.
        cached = 8 * min(count, 2)
        assert usage.expert_capacities(0) == {kind: ExpertCapacity(cached, 8 * count, 10)}
        assert usage.total(0) == usage.slots * 5 + cached * 10
    assert usage.expert_cache == {0: 160}


def test_a_given_expert_cache_counts_on_each_device_that_experts_are_fetched_to() -> None:
    unit = PassingUnit(slot=5, experts=(((("up", 10),), 8),), viewed=3)
    usage = MemoryUsage(0, slots=2, expert_cache=40)
    usage.add_unit(unit, "cpu", 0)
    usage.add_unit(unit, "disk", "cpu")
    assert usage.expert_cache == {0: 40, "cpu": 40}
    assert (usage.total(0), usage.total("cpu")) == (5 + 40, 3 + 40 + staging([10, 10]))


def test_each_accelerator_has_slots_and_staging_for_what_is_streamed_to_it() -> None:
    usage = MemoryUsage(0, slots=2)
    sizes = ((5, 0), (7, 1), (3, 0), (4, 0))
    units = [PassingUnit(slot=size, arriving=arriving, staged=size) for size, arriving in sizes]
    for unit, device in zip(units, (0, 1, 1, 1), strict=True):
        usage.add_unit(unit, "disk", device)
    assert (usage.total(0), usage.total(1)) == (5, 2 * 7 + 2 * 1)
    assert (usage.shared_tensors(0), usage.shared_tensors(1)) == ([5], [7, 7, 2])
    assert usage.total("cpu") == staging([5]) + staging([7, 3, 4])
    assert (usage.slots, usage.slot_bytes) == (2, 7)
    assert usage.over({0: 4, 1: 100, "cpu": 100}) == {0: 1}
    usage.remove_unit(units[1], "disk", 1)
    assert (usage.total(0), usage.total(1)) == (5, 2 * 4)


def test_experts_that_are_fetched_one_by_one_are_cached_on_the_main_device_alone() -> None:
    unit = PassingUnit(slot=5, experts=(((("up", 10),), 8),))
    usage = MemoryUsage(0, slots=2)
    usage.add_unit(unit, "cpu", 0)
    before = usage.total(0), usage.expert_cache
    usage.add_unit(PassingUnit(slot=50), "cpu", 1)
    assert (usage.total(0), usage.expert_cache) == before
    assert usage.expert_capacities(1) == {}


def test_a_resident_unit_takes_no_shared_memory() -> None:
    usage = MemoryUsage(0, slots=2)
    usage.add_unit(PassingUnit(slot=5, staged=5, viewed=5), 0, 0)
    usage.add_unit(PassingUnit(slot=5, staged=5, viewed=5), "cpu", "cpu")
    assert usage.devices == []


def test_a_cache_of_all_experts_fetches_none() -> None:
    assert ExpertCapacity(24, 24, 100).fetched(RouterChoice(1, 2, 8)) == (0, 0)


def test_a_step_fetches_the_share_of_its_experts_that_is_not_cached() -> None:
    assert ExpertCapacity(6, 24, 100).fetched(RouterChoice(1, 2, 8)) == (0, pytest.approx(2 * 18 / 24))


def test_experts_that_routers_choose_again_are_not_fetched() -> None:
    assert ExpertCapacity(6, 24, 100).fetched(RouterChoice(1, 2, 8), 0.25) == (0, pytest.approx(0.75 * 2 * 18 / 24))


def test_a_prompt_that_uses_all_experts_prefetches_the_next_layers_into_the_cache() -> None:
    assert ExpertCapacity(16, 24, 100).fetched(RouterChoice(1000, 2, 8)) == (pytest.approx(8), 0)
    assert ExpertCapacity(11, 24, 100).fetched(RouterChoice(1000, 2, 8)) == (pytest.approx(3), pytest.approx(5))
    assert ExpertCapacity(4, 24, 100).fetched(RouterChoice(1000, 2, 8)) == (0, pytest.approx(8))


def test_the_read_ahead_window_holds_the_largest_block_and_the_beginning_of_the_next() -> None:
    assert read_ahead_window([3 * READ_AHEAD_BYTES, 4 * READ_AHEAD_BYTES, 3 * READ_AHEAD_BYTES]) == 5 * READ_AHEAD_BYTES


def test_the_read_ahead_window_holds_two_small_blocks() -> None:
    assert read_ahead_window([10, 30, 20]) == 60
    assert read_ahead_window([10, 30, 20, 30]) == 60


def test_the_read_ahead_window_is_at_most_the_bytes_of_all_blocks() -> None:
    assert read_ahead_window([30, 20]) == 50
    assert read_ahead_window([]) == 0
