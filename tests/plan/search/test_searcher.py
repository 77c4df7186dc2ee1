"""Greedy and searched assignments keep the budgets to the byte."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import pytest

from bigmodel.errors import BudgetError, PlanError
from bigmodel.plan import plan
from bigmodel.plan.memory.assignment import Assignment, memory_usage
from bigmodel.plan.result.budgets import checked_main
from bigmodel.plan.search.filling import greedy_assignment, least_resident
from bigmodel.plan.search.items import Capacity
from bigmodel.plan.search.searcher import Searcher
from bigmodel.plan.time.cost import CostModel, Objective
from bigmodel.profile import Profile, profile_model

from ...examples import alike
from ...profile.models import tiny_llama
from ..machines import computing, llama_profile, machine

pytestmark = pytest.mark.usefixtures("accelerators")


@cache
def profile() -> Profile:
    model = tiny_llama(num_hidden_layers=6, hidden_size=128, intermediate_size=256)
    return profile_model(model, context_length=32, new_tokens=2, device_type="virtual")


def capacity(share: float, host_compute: bool = False) -> Capacity:
    """Room for a share of the weights on the accelerator, and for all on the host."""
    of = profile()
    accelerator = int(of.weights * share) + of.activations + sum(of.kv_cache)
    return Capacity({0: accelerator, "cpu": 10**8}, of.activations, host_compute=host_compute)


def searcher(offload: str = "stream", link: float = 1e9, host: float = 1e-9) -> Searcher:
    return Searcher(profile(), Objective(CostModel(profile(), machine(link, host=host))), offload)


def greedy(given: Capacity, streams: bool = True) -> Assignment:
    return greedy_assignment(profile(), given, "auto", stream_buffers=False, streams=streams)


@pytest.mark.slow
def test_seconds_are_infinite_as_soon_as_they_are_no_less_than_a_bound() -> None:
    goal = searcher().goal
    known = greedy(capacity(0.5))
    taken = goal.seconds(known)
    alone = max(weight * step.seconds for weight, step in zip(goal.weights.values(), goal.steps(known), strict=True))
    assert goal.seconds(known, taken * 1.001) == taken
    assert goal.seconds(known, alone) == inf


@alike(("objective", "seconds"), [("throughput", 1.3e-8), ("latency", 3e-9), ("throughput", 3e-9)], first=1)
def test_what_fits_is_resident_where_streaming_takes_as_long(objective: str, seconds: float) -> None:
    known = computing(seconds)  # links take next to nothing: only the rounding of sums differs
    accelerator = replace(known.devices["virtual:0"], asynchronous=True)
    known = replace(known, devices={**known.devices, "virtual:0": accelerator})
    of = llama_profile(num_hidden_layers=8, hidden_size=32)
    assert not plan(of, {0: 2**30, "cpu": 2**30}, objective=objective, machine=known).streamed


@pytest.mark.slow
def test_searching_with_bounds_finds_what_searching_without_them_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    given, bounded, twin = capacity(0.6), searcher(link=1.5e10), searcher(link=1.5e10)
    whole = twin.goal.seconds
    monkeypatch.setattr(twin.goal, "seconds", lambda found, below=inf: whole(found))
    assert bounded.best(given, greedy(given)) == twin.best(given, greedy(given))


@pytest.mark.slow
def test_the_search_beats_greedy_and_keeps_to_the_budgets() -> None:
    given, search = capacity(0.6), searcher(link=1.5e10)
    found = search.best(given, greedy(given))
    assert search.goal.seconds(found) < search.goal.seconds(greedy(given))
    assert memory_usage(profile(), found).over(given.budgets) == {}


@pytest.mark.slow
def test_the_known_assignment_is_kept_if_none_fits_or_none_is_better() -> None:
    known = greedy(capacity(2.0))
    assert searcher().best(capacity(2.0), known) is known
    nowhere = Capacity({0: 1, "cpu": 1, "disk": 0})
    assert searcher().best(nowhere, known) is known


def test_offload_compute_runs_parts_on_the_host_and_streams_none() -> None:
    given = capacity(0.5, host_compute=True)
    found = searcher("compute", link=1e12, host=1e-6).best(given, greedy(given, streams=False))
    assert not any(map(found.streamed, range(len(found.storage))))
    assert found.execution.count("cpu") > 2


@pytest.mark.slow
def test_parts_run_elsewhere_for_prompts_only_if_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.plan.search.search.EXACT", 0)  # which takes a second
    given = capacity(0.5, host_compute=True)
    slow_link = searcher("auto", link=1e8, host=4e-9)
    known = slow_link.best(given, greedy(given))
    assert slow_link.goal.seconds(slow_link.best_per_pass(given, known)) <= slow_link.goal.seconds(known)
    slow_host = searcher("auto", link=1e11, host=1e-6)
    known = slow_host.best(given, greedy(given))
    assert slow_host.best_per_pass(given, known) is known


def test_the_prediction_is_that_of_the_objective_and_includes_seconds_saved_per_gib() -> None:
    given, search = capacity(0.5), searcher()
    known = search.best(given, greedy(given))
    prompt, step = search.goal.steps(known)
    found = search.predict(given, known)
    assert (found.prefill, found.token, found.binds) == (prompt.seconds, step.seconds, step.binds)
    all_resident = search.goal.seconds(greedy(capacity(2.0)))
    weight = sum(search.goal.weights.values())
    assert found.seconds_saved_per_gib[0] == pytest.approx((search.goal.seconds(known) - all_resident) / weight)
    assert found.seconds_saved_per_gib["cpu"] == 0


def test_accelerators_of_equal_budgets_save_alike_unless_one_is_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    of, search = profile(), searcher(link=1e6)
    block = max(unit.nbytes for unit in of.units)
    monkeypatch.setattr("bigmodel.plan.search.searcher.GIB", 2 * block)
    room = of.activations + sum(of.kv_cache) + block
    given = Capacity({0: room + 2 * block, 1: room, 2: room, 3: room // 2, "cpu": 10**8}, of.activations)
    saved = search.predict(given, search.best(given, greedy(given))).seconds_saved_per_gib
    assert saved.keys() == given.budgets.keys()
    assert saved[1] == saved[2] > 0


def test_an_unknown_way_to_offload_is_refused() -> None:
    with pytest.raises(PlanError, match="offload is 'steam'; use one of stream"):
        searcher("steam")


PROFILE = profile_model(tiny_llama(num_hidden_layers=6), context_length=32, new_tokens=2)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 1.1])
@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
def test_the_greedy_assignment_fits_to_the_byte(share: float, strategy: str) -> None:
    working = PROFILE.activations + sum(PROFILE.kv_cache)
    budgets = {0: int(share * PROFILE.weights) + working, 1: PROFILE.weights // 3 + working, "cpu": 10**9}
    found = greedy_assignment(PROFILE, Capacity(budgets, PROFILE.activations), strategy, False)
    assert not memory_usage(PROFILE, found).over(budgets)


def test_a_model_that_does_not_fit_is_refused_with_sufficient_budgets() -> None:
    with pytest.raises(BudgetError, match="would do"):
        greedy_assignment(PROFILE, Capacity({0: 1000, "cpu": 1000, "disk": 1000}, PROFILE.activations), "auto", False)


def test_a_main_device_needs_a_budget() -> None:
    assert checked_main("1", {1: 100}) == 1
    assert checked_main(None, {}) is None
    with pytest.raises(PlanError, match="main_device is 0"):
        checked_main(0, {1: 100})


def test_the_least_resident_placement_streams_all_through_one_slot_of_the_largest_accelerator() -> None:
    found = least_resident(profile(), Capacity({0: 10**7, 1: 10**8, "cpu": 10**8}), stream_buffers=False)
    assert found is not None
    assert found.main == 1
    assert found.slots == 1
    assert set(found.storage) == {"cpu"}


def test_the_least_resident_placement_needs_an_accelerator_that_a_block_fits() -> None:
    assert least_resident(profile(), Capacity({"cpu": 10**8}), stream_buffers=False) is None
    assert least_resident(profile(), Capacity({0: 100, "cpu": 10**8}), stream_buffers=False) is None
