"""What is counted is held against what `dispatch` does: the calls beyond those of the same model in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from bigmodel.dispatch import from_pretrained
from bigmodel.plan.time.unit_cost import Inputs, InputTransfers, UnitCost, device_name, expert_calls
from bigmodel.profile import Profile, profile_model
from bigmodel.profile.machine.probe_experts import calls_in
from bigmodel.profile.model.experts import RouterChoice
from bigmodel.profile.trace.trace import OUTSIDE, Allocate, Enter, InitialStorage, Leave, Trace

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
    assert cost.from_host(two, 0) == cost.to_host(two, 0) == pytest.approx(2 * 1e-6 + 1000 / 1e8)
    assert cost.from_host(two, "cpu") == cost.to_host(two, "cpu") == 0


def test_a_model_that_fits_the_processors_cache_is_read_from_it() -> None:
    large, small = (UnitCost(profile(), replace(MACHINE, cache_bytes=size)).cached_share for size in (1, 2**40))
    assert (large, small) == (0.0, 1.0)


def test_experts_that_are_asked_for_are_waited_for() -> None:
    cost = UnitCost(profile(), MACHINE)
    assert cost.fetch_on_demand(0, STREAMED, 0) == 0
    assert cost.fetch_on_demand(1e6, STREAMED, 0) == pytest.approx(1e-6 + 1e6 / 1e8)
    assert cost.fetch_on_demand(1e6, ("disk", 0), 2**40) == pytest.approx(1e6 / MACHINE.disk_cold)


def test_a_device_has_its_name_and_what_holds_files_is_the_host() -> None:
    assert [device_name(key) for key in (1, "cpu", "disk")] == ["virtual:1", "cpu", "cpu"]


@pytest.mark.parametrize("chosen", [2, 8])
def test_calls_are_as_many_as_a_layer_of_a_dispatched_mixture_makes(chosen: int, tmp_path: Path) -> None:
    two, four = (calls_of_dispatching(layers, chosen, tmp_path / str(layers)) for layers in (2, 4))
    assert (four - two) / 2 == pytest.approx(expert_calls(RouterChoice(1, chosen, 32)), rel=0.3)


def calls_of_dispatching(layers: int, chosen: int, folder: Path) -> int:
    """Return how many more calls a forward of a mixture makes whose experts are fetched one by one."""
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=32, num_experts_per_tok=chosen,
    )  # fmt: skip
    plain = MixtralForCausalLM(config).eval()
    plain.save_pretrained(folder)
    ids = torch.ones(1, 1, dtype=torch.long)
    counts = []
    for model in (from_pretrained(folder, {"": "disk"}), plain):
        model.set_experts_implementation("grouped_mm")
        with torch.inference_mode():
            model(ids)  # the experts are there afterwards
            counts.append(calls_in(lambda model=model: model(ids)))
    dispatched, alone = counts
    return dispatched - alone


def test_where_nearly_all_are_wanted_the_next_modules_are_seen_to() -> None:
    few, nearly_all = RouterChoice(1, 2, 8), RouterChoice(64, 2, 8)
    assert nearly_all.wanted > 7
    assert expert_calls(nearly_all) - expert_calls(few) > 8 * 28


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


def test_on_one_device_nothing_crosses() -> None:
    transfers = InputTransfers(TRACE)
    assert [transfers.from_elsewhere(unit, (0, 0, 0), 0) for unit in range(3)] == [[], [], []]


def test_each_unit_has_what_lies_elsewhere_brought_every_time() -> None:
    found = InputTransfers(TRACE).from_elsewhere(1, (0, "cpu", "cpu"), 0)
    assert found == [(0, Inputs(OUTSIDE, 1, 5)), (0, Inputs(maker=0, tensors=1, nbytes=10))]


def test_what_the_host_gives_back_lies_on_the_main_device() -> None:
    transfers = InputTransfers(TRACE)
    assert transfers.from_elsewhere(2, ("cpu", "cpu", "cpu"), 0) == [(0, Inputs(1, 1, 100, returned=True))]
    assert transfers.from_elsewhere(2, ("cpu", "cpu", "cpu"), "cpu") == []


def test_what_is_made_between_units_lies_where_what_it_was_made_of_does() -> None:
    trace = Trace((Enter(0), Allocate(0, 4), Leave(0), Allocate(1, 8, source=0), Enter(1, ((1, 8),)), Leave(1)))
    assert InputTransfers(trace).from_elsewhere(1, (1, 0), 0) == [(1, Inputs(maker=0, tensors=1, nbytes=8))]
