"""Seconds of single units, and the inputs that cross links."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bigmodel.plan.time.unit_cost import Inputs, InputTransfers, UnitCost
from bigmodel.profile import Profile, profile_model
from bigmodel.profile.machine.machine import ExpertOverhead, LinkSpeed
from bigmodel.profile.trace.events import OUTSIDE, Allocate, Enter, Leave
from bigmodel.profile.trace.trace import InitialStorage, Trace

from ...dispatch.mixtures import mixtral
from ...profile.models import tiny_llama
from ..machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")

MACHINE = machine(link=1e8)
STREAMED = ("cpu", 0)


@cache
def profile() -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=2), context_length=32, new_tokens=2, device_type="virtual")


@cache
def block() -> int:
    return next(index for index, unit in enumerate(profile().units) if unit.is_block)


@pytest.mark.slow
def test_streamed_units_take_the_time_of_the_link_and_others_none() -> None:
    cost, weights = UnitCost(profile(), MACHINE), profile().units[block()].weights
    assert cost.fetch(0, block(), STREAMED, 0) == pytest.approx(1e-6 + weights / 1e8)
    assert cost.fetch(0, block(), (0, 0), 0) == cost.fetch(0, block(), ("cpu", "cpu"), 0) == 0


@pytest.mark.slow
def test_units_on_disk_take_the_time_of_the_disk_if_that_is_longer() -> None:
    cost, weights = UnitCost(profile(), MACHINE), profile().units[block()].weights
    assert cost.fetch(0, block(), ("disk", 0), on_disk=weights) == cost.fetch(0, block(), STREAMED, 0)
    assert cost.fetch(0, block(), ("disk", 0), on_disk=2**40) == pytest.approx(weights / MACHINE.disk_cold)


@pytest.mark.slow
def test_compute_takes_the_time_of_the_device_and_longer_for_a_prompt_than_for_a_step() -> None:
    cost = UnitCost(profile(), MACHINE)
    host, accelerator = cost.compute(1, block(), "cpu"), cost.compute(1, block(), 0)
    assert 0 < accelerator < host < cost.compute(0, block(), "cpu")
    assert cost.least_compute(1, block(), 0) == accelerator


def test_inputs_cross_a_link_each_way() -> None:
    cost = UnitCost(profile(), MACHINE)
    two = Inputs(producer=0, tensors=2, nbytes=1000)
    assert cost.from_host(two, 0) == cost.to_host(two, 0) == pytest.approx(2 * 1e-6 + 1000 / 1e8)
    assert cost.from_host(two, "cpu") == cost.to_host(two, "cpu") == 0


def test_accelerators_of_a_kind_copy_directly_to_each_other() -> None:
    """Not through the host, whose memory no byte enters: over one link, and not over two."""
    two = Inputs(producer=0, tensors=2, nbytes=1000)
    links = replace(MACHINE.links["virtual:0"], to_peer=LinkSpeed(5e8, 3e-6))
    direct = UnitCost(profile(), replace(MACHINE, links={"virtual:0": links}))
    assert direct.crossings(two, 1, 0) == (pytest.approx(2 * 3e-6 + 1000 / 5e8), 0.0)
    for cost, source in ((UnitCost(profile(), MACHINE), 1), (direct, "cpu")):
        assert cost.crossings(two, source, 0) == (cost.to_host(two, source), cost.from_host(two, 0))


def test_a_model_that_fits_the_processors_cache_is_read_from_it() -> None:
    large, small = (UnitCost(profile(), replace(MACHINE, cache_bytes=size)).cached_share for size in (1, 2**40))
    assert (large, small) == (0.0, 1.0)


def test_experts_fetched_on_demand_add_their_transfer_time() -> None:
    cost = UnitCost(profile(), MACHINE)
    assert cost.fetch_on_demand(0, STREAMED, 0) == 0
    assert cost.fetch_on_demand(1e6, STREAMED, 0) == pytest.approx(1e-6 + 1e6 / 1e8)
    assert cost.fetch_on_demand(1e6, ("disk", 0), 2**40) == pytest.approx(1e6 / MACHINE.disk_cold)


@pytest.mark.slow
def test_each_module_of_experts_adds_the_measured_overhead() -> None:
    mixture = profile_model(mixtral(num_hidden_layers=2), context_length=32, new_tokens=2, device_type="virtual")
    measured = replace(MACHINE, expert_overhead=ExpertOverhead(module=1.0, chosen=0.01, ahead=0.0001))
    cost = UnitCost(mixture, measured)
    block = next(index for index, unit in enumerate(mixture.units) if unit.experts)
    (choice,) = cost.choices[1][block].values()
    assert cost.expert_overhead(1, block) == pytest.approx(1.0 + 0.01 * choice.wanted)
    assert cost.expert_overhead(1, 0) == 0


MASK, ROTATION, HIDDEN, CACHE = 0, 1, 2, 3
TRACE = Trace(
    (
        Allocate(MASK, 5),
        Enter(0, ((MASK, 5),)),
        Allocate(ROTATION, 10),
        Leave(0),
        Enter(1, ((MASK, 5), (ROTATION, 10))),
        Allocate(HIDDEN, 100),
        Leave(1, ((HIDDEN, 100),)),
        Enter(2, ((HIDDEN, 100), (ROTATION, 10), (CACHE, 7))),
        Leave(2),
    ),
    (InitialStorage(CACHE, 7, 1),),
)
"""Unit 1 gives back what it returns, and keeps a cache; it and unit 2 are called with what others made."""


def test_one_device_has_no_input_transfers() -> None:
    transfers = InputTransfers(TRACE)
    assert [transfers.from_elsewhere(unit, (0, 0, 0), 0) for unit in range(3)] == [[], [], []]


@pytest.mark.parametrize("execution", itertools.product((0, 1, "cpu"), repeat=3))
@pytest.mark.parametrize("main", [0, "cpu"])
def test_no_other_units_have_inputs_elsewhere_than_those_that_may(execution: tuple[Any, ...], main: Any) -> None:
    transfers = InputTransfers(TRACE)
    crossing = {unit for unit in range(3) if transfers.from_elsewhere(unit, execution, main)}
    assert crossing <= transfers.may_cross(execution, main)


def test_inputs_on_another_device_are_transferred_for_each_unit() -> None:
    found = InputTransfers(TRACE).from_elsewhere(1, (0, "cpu", "cpu"), 0)
    assert found == [(0, Inputs(OUTSIDE, 1, 5)), (0, Inputs(producer=0, tensors=1, nbytes=10))]


def test_outputs_of_units_on_the_host_are_on_the_main_device() -> None:
    transfers = InputTransfers(TRACE)
    assert transfers.from_elsewhere(2, ("cpu", "cpu", "cpu"), 0) == [(0, Inputs(1, 1, 100, returned=True))]
    assert transfers.from_elsewhere(2, ("cpu", "cpu", "cpu"), "cpu") == []


def test_results_of_operations_between_units_are_on_the_device_of_their_inputs() -> None:
    trace = Trace((Enter(0), Allocate(0, 4), Leave(0), Allocate(1, 8, source=0), Enter(1, ((1, 8),)), Leave(1)))
    assert InputTransfers(trace).from_elsewhere(1, (1, 0), 0) == [(1, Inputs(producer=0, tensors=1, nbytes=8))]
