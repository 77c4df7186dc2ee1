"""The incremental count against a slow recount, and the search's count against the exact evaluation."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.plan.memory.evaluate import memory_usage
from bigmodel.plan.memory.slots import read_ahead_window, staging
from bigmodel.plan.memory.usage import WEIGHTS, MemoryUsage
from bigmodel.plan.result.budgets import Key, is_accelerator
from bigmodel.plan.search.feasibility import Option, add_group, options_of, remove_group
from bigmodel.plan.search.items import Capacity, GroupPlacement, Item, assignment_of, item_of, tie_groups
from bigmodel.profile import Profile, profile_model

from ...profile.models import tiny_llama

CAPACITY = Capacity({0: 1, 1: 1, "cpu": 1}, activations=1, host_compute=True)


@cache
def profile() -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=4), context_length=16, new_tokens=2)


def recount(chosen: list[tuple[Item, Option]], device: Key) -> int:
    """Return the bytes of a device, counted from nothing."""
    total = slabs = turns = 0
    viewed, staged = [], []
    for item, (storage, execution) in chosen:
        streams = is_accelerator(execution) and not is_accelerator(storage)
        nbytes = item.held_bytes(streams)
        total += (nbytes if storage == device else 0) + (item.working if execution == device else 0)
        if streams:
            slabs, turns = max(slabs, item.slot_bytes), turns + 1
        if storage == "disk":
            (staged if streams else viewed).append(nbytes)
    if device == CAPACITY.main:
        total += min(turns, CAPACITY.slots) * slabs
    return total + (read_ahead_window(viewed) + staging(staged) if device == "cpu" else 0)


steps = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=20
)


@given(steps)
def test_adding_and_removing_groups_equals_a_recount(steps: list[tuple[int, int, int, int, bool]]) -> None:
    usage = MemoryUsage(CAPACITY.main, CAPACITY.slots)
    present: list[tuple[Item, Option]] = []
    for weights, working, number, position, removes in steps:
        if removes and present:
            item, option = present.pop(position % len(present))
            remove_group(usage, item, option, CAPACITY)
        else:
            item = Item(weights, working, slot_bytes=weights + position)
            options = options_of(item, CAPACITY)
            present.append((item, options[number % len(options)]))
            add_group(usage, *present[-1], CAPACITY)
        for device in (0, 1, "cpu", "disk"):
            assert usage.total(device) == recount(present, device)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=40, max_size=40), st.booleans())
def test_the_search_counts_no_less_than_the_exact_evaluation_beside_activations(
    numbers: list[int], stream_buffers: bool
) -> None:
    groups = tie_groups(profile().units)
    items = [item_of(group, profile(), stream_buffers) for group in groups]
    usage, options = MemoryUsage(CAPACITY.main, CAPACITY.slots), []
    for item, number in zip(items, numbers, strict=False):
        available = options_of(item, CAPACITY)
        options.append(available[number % len(available)])
        add_group(usage, item, options[-1], CAPACITY)
    storage, execution = tuple(storage for storage, _ in options), tuple(execution for _, execution in options)
    placement = GroupPlacement(storage, execution, CAPACITY.main, usage.slots, usage.slot_bytes)
    capacity = Capacity(CAPACITY.budgets, main_device=CAPACITY.main)
    exact = memory_usage(profile(), assignment_of(profile(), groups, placement, stream_buffers, capacity))
    assert sum(exact.of(device, WEIGHTS) for device in exact.devices) == profile().weights
    for device in exact.devices:
        assert usage.total(device) >= exact.total(device) - exact.of(device, "activations")
