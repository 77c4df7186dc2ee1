from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from bigmodel.plan.crossing import Inputs
from bigmodel.plan.unit_cost import UnitCost, device_name
from bigmodel.profile import Profile, profile_model

from ..profile.models import tiny_llama
from .machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")

MACHINE = machine(link=1e8)
STREAMED = ("cpu", 0)


@cache
def profile() -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=2), context_length=32, new_tokens=2, device_type="virtual")


@cache
def block() -> int:
    return next(index for index, unit in enumerate(profile().units) if unit.is_block)


def test_only_what_is_streamed_is_fetched_and_takes_the_links_time() -> None:
    cost, weights = UnitCost(profile(), MACHINE), profile().units[block()].weights
    assert cost.fetch(0, block(), STREAMED, 0) == pytest.approx(1e-6 + weights / 1e8)
    assert cost.fetch(0, block(), (0, 0), 0) == cost.fetch(0, block(), ("cpu", "cpu"), 0) == 0


def test_from_disk_it_takes_the_disks_time_where_that_is_longer() -> None:
    cost, weights = UnitCost(profile(), MACHINE), profile().units[block()].weights
    assert cost.fetch(0, block(), ("disk", 0), on_disk=weights) == cost.fetch(0, block(), STREAMED, 0)
    assert cost.fetch(0, block(), ("disk", 0), on_disk=2**40) == pytest.approx(weights / MACHINE.disk_cold)


def test_computing_takes_what_the_device_takes_and_more_for_a_prompt_than_for_a_step() -> None:
    cost = UnitCost(profile(), MACHINE)
    host, accelerator = cost.compute(1, block(), "cpu"), cost.compute(1, block(), 0)
    assert 0 < accelerator < host < cost.compute(0, block(), "cpu")
    assert cost.least_compute(1, block(), 0) == accelerator


def test_inputs_cross_a_link_each_way() -> None:
    cost = UnitCost(profile(), MACHINE)
    two = Inputs(maker=0, tensors=2, nbytes=1000)
    assert cost.arriving(two, 0) == cost.leaving(two, 0) == pytest.approx(2 * 1e-6 + 1000 / 1e8)
    assert cost.arriving(two, "cpu") == cost.leaving(two, "cpu") == 0


def test_a_model_that_fits_the_processors_cache_is_read_from_it() -> None:
    large, small = (UnitCost(profile(), replace(MACHINE, cache_bytes=size)).cached_share for size in (1, 2**40))
    assert (large, small) == (0.0, 1.0)


def test_experts_that_are_asked_for_are_waited_for() -> None:
    cost = UnitCost(profile(), MACHINE)
    assert cost.asked(0, STREAMED, 0) == 0
    assert cost.asked(1e6, STREAMED, 0) == pytest.approx(1e-6 + 1e6 / 1e8)
    assert cost.asked(1e6, ("disk", 0), 2**40) == pytest.approx(1e6 / MACHINE.disk_cold)


def test_a_device_has_its_name_and_what_holds_files_is_the_host() -> None:
    assert [device_name(key) for key in (1, "cpu", "disk")] == ["virtual:1", "cpu", "cpu"]
