"""Assignments, and the bytes that they take on each device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.devices import cgroup, max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model
from bigmodel.plan import plan, read_ahead_window, staging
from bigmodel.plan.memory.assignment import (
    Assignment,
    assemble,
    default_pinned_memory,
    device_uses,
    expert_capacities,
    host_only,
    memory_usage,
    passing_usage,
    with_workspace_apart,
)
from bigmodel.plan.memory.usage import SLOTS, ExpertCapacity
from bigmodel.profile import Profile, profile_model
from bigmodel.profile.trace.generation import keeps_mask
from bigmodel.verify.planned_use import planned_use

from ...dispatch.mixtures import LAYERS, deepseek_v3, mixtral
from ...examples import alike
from ...profile.models import Stack, on_meta, tiny_llama
from ..machines import machine

pytestmark = pytest.mark.usefixtures("accelerators")


def test_units_stored_off_the_accelerator_that_runs_them_are_streamed() -> None:
    assignment = Assignment(storage=("cpu", 0, "cpu", "disk"), execution=(0, 0, "cpu", 0), main=0)
    assert [assignment.streamed(index) for index in range(4)] == [True, False, False, True]


def test_units_with_computed_below_run_on_the_host_in_steps() -> None:
    assignment = Assignment(storage=("cpu", "cpu"), execution=(0, 0), main=0, computed_below={1: 9})
    assert assignment.in_steps().execution == (0, "cpu")
    assert assignment.in_steps().in_steps() == assignment.in_steps()


def test_host_only_stores_and_runs_everything_on_the_host() -> None:
    profile = profile_model(Stack())
    assignment = host_only(profile)
    assert set(assignment.storage) == set(assignment.execution) == {"cpu"}
    assert len(assignment.storage) == len(profile.units)


def test_one_device_holds_everything_once() -> None:
    model = on_meta(Stack, tied=True, direct=True)
    profile = profile_model(model)
    ((device, use),) = device_uses(profile, host_only(profile)).items()
    assert device == "cpu"
    assert use.weights == sum(p.nbytes for p in model.parameters())
    assert use.buffers == sum(b.nbytes for b in model.buffers())
    assert use.total == use.weights + use.buffers


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_weights_count_on_storage_devices_and_the_rest_on_execution_devices(padded: bool) -> None:
    profile = profile_model(tiny_llama(), context_length=32, padded=padded)
    mask = padded or keeps_mask()
    count = len(profile.units)
    uses = device_uses(profile, Assignment(("cpu",) * count, (0,) * count, 0, slots=2))
    assert uses["cpu"].weights == profile.weights
    # Ids and positions are brought to the first weights, and the mask if there is one; scores come back there.
    assert uses["cpu"].total == profile.weights + (2 + mask) * 32 * 8 + 96 * 4
    assert uses[0].buffers == profile.buffers
    assert uses[0].kv_cache == sum(profile.kv_cache)
    assert uses[0].activations == profile.activations + (1 + mask) * 32 * 8  # but ids they came back
    assert uses[0].slots == 2 * max(unit.slot_bytes() for unit in profile.units if not unit.is_lookup)


def test_workspace_of_kernels_is_separated_from_activations() -> None:
    convolution = nn.Conv2d(3, 8, 3, padding=1)
    profile = profile_model(convolution, device_type="cpu", sample_inputs=torch.zeros(1, 3, 32, 32))
    assignment = host_only(profile)
    together = device_uses(profile, assignment)
    apart = with_workspace_apart(together, profile, assignment)
    assert apart["cpu"].workspace > 0
    assert apart["cpu"].activations == together["cpu"].activations - apart["cpu"].workspace
    assert apart["cpu"].total == together["cpu"].total


def test_streamed_buffers_are_stored_with_the_weights() -> None:
    profile = profile_model(tiny_llama(), context_length=0)
    count = len(profile.units)
    uses = device_uses(profile, Assignment(("cpu",) * count, (0,) * count, 0, stream_buffers=True))
    assert uses["cpu"].buffers == profile.buffers


@pytest.mark.slow
def test_units_on_disk_that_the_host_computes_count_in_its_memory() -> None:
    profile = profile_model(tiny_llama(), context_length=32)
    count = len(profile.units)
    uses = device_uses(profile, Assignment(("disk",) * count, ("cpu",) * count, "cpu"))
    viewed = [unit.weights for unit in profile.units if not unit.is_lookup]
    assert uses["cpu"].weights == 0
    assert uses["cpu"].slots == read_ahead_window(viewed)


def test_units_streamed_from_disk_are_staged_in_host_memory() -> None:
    profile = profile_model(tiny_llama(), context_length=32)
    storage = tuple("cpu" if unit.is_lookup else "disk" for unit in profile.units)
    uses = device_uses(profile, Assignment(storage, (0,) * len(storage), 0))
    assert uses["cpu"].slots == staging([unit.weights for unit in profile.units if not unit.is_lookup])


def test_a_tie_across_devices_is_counted_on_each() -> None:
    profile = profile_model(on_meta(Stack, tied=True, depth=1))
    table = profile.units[0].weights
    storage = tuple(0 if unit.name == "embed" else 1 for unit in profile.units)
    uses = device_uses(profile, Assignment(storage, storage, 0))
    assert uses[0].weights == table
    assert uses[1].weights == profile.weights


def test_blocks_streamed_from_disk_are_staged_on_a_host_that_stores_none() -> None:
    profile = profile_model(tiny_llama(), context_length=32)
    storage = tuple(0 if unit.is_lookup else "disk" for unit in profile.units)
    staged = staging([unit.weights for unit in profile.units if not unit.is_lookup])
    assert device_uses(profile, Assignment(storage, (0,) * len(storage), 0))["cpu"].slots == staged
    assert device_uses(profile, Assignment(storage, (0,) * len(storage), 0, staging_bytes=100))["cpu"].slots == 100


def test_half_of_what_a_control_group_allows_may_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "limit_bytes", lambda: 2000)
    assert default_pinned_memory() == 1000


def test_usage_over_a_budget_is_reported_in_bytes() -> None:
    profile = profile_model(Stack())
    usage = memory_usage(profile, host_only(profile))
    total = usage.total("cpu")
    assert usage.over({"cpu": total}) == {}
    assert usage.over({"cpu": total - 7}) == {"cpu": 7}
    on_disk = memory_usage(profile, Assignment(("disk",) * len(profile.units), ("cpu",) * len(profile.units), "cpu"))
    assert "disk" not in on_disk.over({})
    assert on_disk.over({"disk": 1})["disk"] == profile.weights - 1


@pytest.mark.slow
@alike("kept", [2, 0], first=1)
def test_the_accelerators_peak_is_predicted_beside_blocks_that_the_host_computes(kept: int) -> None:
    """Blocks pass what they return from one to the next on the host; only rows of tables and logits come back."""
    from transformers import LlamaForCausalLM

    skeleton: Any = tiny_llama(num_hidden_layers=4)
    model: Any = LlamaForCausalLM(skeleton.config).eval()
    profile = profile_model(model, context_length=64, new_tokens=2, device_type="virtual")
    block = max(unit.nbytes + cache for unit, cache in zip(profile.units, profile.kv_cache, strict=True))
    found = plan(profile, {0: profile.activations + kept * block, "cpu": 2**30}, offload="compute", machine=machine())
    assert found.main_device == 0
    assert {part.runs_on for part in found.parts if part.kind == "LlamaDecoderLayer"} == {"cpu", *([0] if kept else [])}
    gc.collect()
    before = memory_allocated(0)
    dispatch_model(model, found, skip_keys=model._skip_keys_device_placement)
    use = planned_use(model, found)
    with torch.no_grad():
        use.whole()
        gc.collect()
        reset_peak_memory(0)
        use.whole()
    assert max_memory_allocated(0) - before == found.devices[0].total


def streamed(profile: Profile, storage: str = "cpu") -> Assignment:
    """Return the assignment in which every block is streamed to the first accelerator."""
    blocks = [unit.is_block for unit in profile.units]
    slot_bytes = max(unit.slot_bytes() for unit in profile.units if unit.is_block)
    places = tuple(storage if block else 0 for block in blocks)
    return Assignment(places, (0,) * len(blocks), 0, slots=2, slot_bytes=slot_bytes)


@pytest.mark.slow
def test_the_expert_cache_is_two_whole_layers_less_the_slots_without_experts() -> None:
    profile = profile_model(mixtral(), context_length=16)
    assignment = streamed(profile)
    caches = expert_capacities(profile, assignment)
    block = next(unit for unit in profile.units if unit.is_block)
    assert set(caches.values()) == {ExpertCapacity(16, 8 * LAYERS, block.experts[0].nbytes)}
    assert passing_usage(profile.units, assignment).of(0, SLOTS) == 2 * block.slot_bytes()


@pytest.mark.slow
def test_a_dense_layer_with_larger_slots_reduces_the_expert_cache() -> None:
    profile = profile_model(deepseek_v3(), context_length=16)
    assignment = streamed(profile)
    rest = max(unit.slot_bytes_without_experts() for unit in profile.units if unit.is_block)
    (cache,) = set(expert_capacities(profile, assignment).values())
    whole = max(unit.slot_bytes() for unit in profile.units if unit.is_block)
    assert cache.slots == min((2 * whole - 2 * rest) // cache.expert_bytes, cache.experts)
    assert passing_usage(profile.units, assignment).of(0, SLOTS) == 2 * rest + cache.slots * cache.expert_bytes


@pytest.mark.slow
def test_experts_on_disk_that_the_host_computes_are_cached_in_its_memory() -> None:
    profile = profile_model(mixtral(), context_length=16)
    blocks = [unit.is_block for unit in profile.units]
    assignment = Assignment(tuple("disk" if block else "cpu" for block in blocks), ("cpu",) * len(blocks), "cpu")
    (cache,) = set(expert_capacities(profile, assignment).values())
    assert cache.slots == 16
    assert passing_usage(profile.units, assignment).of("cpu", SLOTS) >= 16 * cache.expert_bytes


def test_reasons_differ_by_place() -> None:
    profile = profile_model(on_meta(Stack, depth=3, direct=True))
    storage = {"embed": "cpu", "blocks.0": 0, "blocks.1": "cpu", "blocks.2": "disk", "scale": 0}
    where = tuple(storage.get(unit.name, 0) for unit in profile.units)
    execution = tuple("cpu" if unit.name == "embed" else 0 for unit in profile.units)
    plan = assemble(profile, Assignment(where, execution, 0), {0: 10**6, "cpu": 10**6}, "auto")
    reasons = {part.name: part.reason for part in plan.parts}
    assert "looked up in RAM" in reasons["embed"]
    assert "resident" in reasons["blocks.0"]
    assert "streamed from RAM" in reasons["blocks.1"]
    assert "streamed from disk" in reasons["blocks.2"]
    assert "split module" in reasons["scale"]


def test_devices_are_listed_in_the_order_of_the_budgets_and_unlimited_ones_last() -> None:
    profile = profile_model(Stack())
    plan = assemble(profile, host_only(profile), {0: 5, "cpu": 10**6}, "auto")
    assert list(plan.devices) == [0, "cpu"]
    assert plan.devices[0].total == 0


def test_given_reasons_take_precedence() -> None:
    profile = profile_model(Stack())
    plan = assemble(profile, host_only(profile), {"cpu": 10**6}, "auto", reasons={0: "because"})
    assert plan.parts[0].reason == "because"
