"""The search against brute force, under one memory rule (`Filling`) and one cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bigmodel import make_plan
from bigmodel.plan.result.budgets import is_accelerator
from bigmodel.plan.search.filling import Option, options_of, place_greedily
from bigmodel.plan.search.items import Capacity, GroupPlacement, Item
from bigmodel.plan.search.search import search
from bigmodel.plan.time.cost import Visit, seconds_of_pass
from tests.examples import alike, few

from ..machines import machine
from .groups import group, placement_of

Costs = Sequence[tuple[float, float, float]]
"""Of each item: seconds on an accelerator, on the CPU, and on the link."""


def option_costs(costs: Costs, index: int, option: Option) -> tuple[float, float]:
    storage, execution = option
    on_accelerator, on_host, link = costs[index]
    if not is_accelerator(execution):
        return on_host, 0.0
    return on_accelerator, 0.0 if is_accelerator(storage) else link * (5 if storage == "disk" else 1)


def seconds_with(costs: Costs) -> Callable[..., float]:
    def seconds(placement: GroupPlacement, below: float = inf) -> float:
        options = zip(placement.storage, placement.execution, strict=True)
        return seconds_of_pass([Visit(*option_costs(costs, i, o)) for i, o in enumerate(options)], placement.slots)

    return seconds


def brute_force(items: Sequence[Item], capacity: Capacity, seconds: Callable[..., float]) -> float | None:
    """Every option of every item: the slow, obvious way."""
    placements = (
        placement_of(items, capacity, chosen) for chosen in itertools.product(*(options_of(i, capacity) for i in items))
    )
    greedy = place_greedily(items, capacity)
    taken = [seconds(placement) for placement in placements if placement is not None]
    return min([*taken, *([seconds(greedy)] if greedy is not None else [])], default=None)


def searched(items: Sequence[Item], capacity: Capacity, costs: Costs) -> GroupPlacement | None:
    return search(items, capacity, seconds_with(costs), lambda index, option: [option_costs(costs, index, option)])


sizes = st.integers(1, 9)
times = st.sampled_from([0.5, 1.0, 2.0, 5.0])


@pytest.mark.slow
@given(
    st.lists(st.tuples(sizes, times, times, times), min_size=1, max_size=5),
    st.lists(st.integers(0, 40), min_size=0, max_size=2),
    st.integers(0, 30),
    st.booleans(),
    st.booleans(),
)
def test_a_model_of_few_parts_is_placed_as_brute_force_would(
    parts: list[tuple[int, float, float, float]],
    accelerators: list[int],
    host: int,
    host_compute: bool,
    quantised: bool,
) -> None:
    items = [group(size, offloaded=size // 2 if quantised else None) for size, *_ in parts]
    costs = [(one, other, link) for _, one, other, link in parts]
    capacity = Capacity({**dict(enumerate(accelerators)), "cpu": host}, activations=1, host_compute=host_compute)
    expected = brute_force(items, capacity, seconds_with(costs))
    found = searched(items, capacity, costs)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert seconds_with(costs)(found) == pytest.approx(expected)


@pytest.mark.slow
@alike("budget", [5, 8, 11], first=1)
def test_twelve_equal_blocks_are_placed_as_brute_force_would(budget: int) -> None:
    items = [group(1)] * 12
    costs = [(1.0, 9.0, 1.5)] * 12
    capacity = Capacity({0: budget, "cpu": 12, "disk": 0})
    found = searched(items, capacity, costs)
    assert found is not None
    every = [
        placement_of(items, capacity, [(0, 0) if stays else ("cpu", 0) for stays in kept])
        for kept in itertools.product((True, False), repeat=12)
    ]
    assert seconds_with(costs)(found) == pytest.approx(min(seconds_with(costs)(p) for p in every if p is not None))


def test_quantised_blocks_are_placed_by_their_quantised_bytes() -> None:
    """Streamed from RAM they take a quarter of it, which has no room for them as they are."""
    items = [group(4, offloaded=1)] * 4
    costs = [(1.0, 99.0, 2.0), (1.0, 99.0, 9.0), (1.0, 99.0, 9.0), (1.0, 99.0, 2.0)]
    capacity = Capacity({0: 12, "cpu": 3})
    found, expected = searched(items, capacity, costs), brute_force(items, capacity, seconds_with(costs))
    assert found is not None
    assert seconds_with(costs)(found) == expected


def test_streamed_blocks_of_a_deep_model_lie_between_resident_ones() -> None:
    items = [group(1)] * 40
    costs = [(1.0, 99.0, 2.0)] * 40
    capacity = Capacity({0: 32, "cpu": 40})
    found, greedy = searched(items, capacity, costs), place_greedily(items, capacity)
    assert found is not None
    assert greedy is not None
    assert seconds_with(costs)(found) == pytest.approx(40.0)
    assert seconds_with(costs)(greedy) > 40.0


def test_the_host_runs_everything_where_a_tensor_of_a_split_module_does_not_fit() -> None:
    items = [group(1)] * 10 + [replace(group(50), pinned=True)] + [group(1)] * 10
    found = searched(items, Capacity({0: 30, "cpu": 100}), [(1.0, 9.0, 1.0)] * len(items))
    assert found is not None
    assert set(found.storage) == set(found.execution) == {"cpu"}


@pytest.mark.usefixtures("accelerators")
def test_a_large_head_stays_where_its_slot_would_take_the_room_of_many_blocks() -> None:
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(100)]
    model = nn.Sequential(nn.Embedding(1024, 64), *itertools.chain(*blocks), nn.Linear(64, 1024))
    budget = 2 * sum(parameter.nbytes for parameter in model.parameters()) // 5
    made = make_plan(
        model,
        {0: budget, "cpu": 2**34},
        sample_inputs=torch.ones(1, 4, dtype=torch.long),
        machine=machine(host=1e-6),
        objective="latency",
    )
    table, head = made.parts[0], made.parts[-1]
    assert (table.device, head.device) == ("cpu", 0)
    block = 4 * 64 * 65
    beside = made.devices[0].slots + made.devices[0].activations + head.bytes
    assert sum(part.bytes for part in made.streamed) <= 100 * block - (budget - beside) + 100 * 512 + block


def test_blocks_are_computed_on_the_cpu_if_that_is_faster_than_fetching_them() -> None:
    items = [group(1)] * 20
    costs = [(1.0, 1.5, 10.0)] * 20
    stream = searched(items, Capacity({0: 12, "cpu": 40}), costs)
    auto = searched(items, Capacity({0: 12, "cpu": 40}, host_compute=True), costs)
    assert stream is not None
    assert auto is not None
    assert "cpu" not in stream.execution
    assert seconds_with(costs)(auto) < seconds_with(costs)(stream) / 2


@pytest.mark.slow
@settings(max_examples=few(8))
@given(st.lists(st.tuples(sizes, times, times, times), min_size=13, max_size=24), st.integers(10, 150))
def test_a_deep_model_is_placed_within_budgets_and_no_worse_than_greedily(
    parts: list[tuple[int, float, float, float]], budget: int
) -> None:
    items = [group(size) for size, *_ in parts]
    costs = [(one, other, link) for _, one, other, link in parts]
    capacity = Capacity({0: budget, 1: budget // 2, "cpu": 60}, activations=2)
    found, greedy = searched(items, capacity, costs), place_greedily(items, capacity)
    if greedy is None:
        return
    assert found is not None
    assert seconds_with(costs)(found) <= seconds_with(costs)(greedy)
    for key, size in capacity.budgets.items():
        assert sum(item.weights for item, storage in zip(items, found.storage, strict=True) if storage == key) <= size
