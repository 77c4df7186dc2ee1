"""Memory as a caching allocator takes it: plans against virtual accelerators whose allocators cache as CUDA's does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.devices import reset_peak_memory, virtual
from bigmodel.devices.caching import MemoryPeaks, memory_peaks
from bigmodel.devices.memory import CachingMemory
from bigmodel.dispatch import dispatch_model, get_plan, undispatch
from bigmodel.plan import Plan, plan
from bigmodel.plan.memory.reserved import ReservedMemory, block_bytes
from bigmodel.plan.result.budgets import caching_memories
from bigmodel.profile.trace.trace import InitialStorage
from bigmodel.verify.planned_use import planned_use

from ..machines import llama_profile

MiB = 2**20
CONTEXT = 24 * MiB
SHAPES: dict[str, int] = {"context_length": 32, "new_tokens": 3, "batch_size": 2}


@pytest.fixture
def caching() -> Iterator[None]:
    """Two accelerators with caching allocators."""
    virtual.enable(2, caching=virtual.Caching(context=CONTEXT, workspace=3 * MiB))
    yield
    virtual.enable(2)
    virtual.disable()


def model(**sizes: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 500}
    return LlamaForCausalLM(LlamaConfig(**{**config, **sizes}, num_attention_heads=4)).eval()


def measured(whole: Any, found: Plan) -> MemoryPeaks:
    """Return the peaks of the first accelerator while the planned shape is generated, its loading included."""
    reset_peak_memory(0)
    dispatch_model(whole, found)
    with torch.inference_mode():
        planned_use(whole, found).whole()
    peaks = memory_peaks(0)
    undispatch(whole)
    return peaks


@pytest.mark.usefixtures("caching")
@pytest.mark.parametrize("budget", [27 * MiB, 60 * MiB])
@pytest.mark.long
@pytest.mark.slow
def test_the_peak_of_tensors_is_that_of_their_blocks_and_reserved_bytes_keep_to_the_plan(budget: int) -> None:
    """Resident, and streamed through slots."""
    whole = model(num_hidden_layers=9)
    found = plan(whole, {0: budget, "cpu": 10**9}, **SHAPES)
    device = found.devices[0]
    assert found.main_device == 0
    assert bool(found.streamed) == (budget < 60 * MiB)
    peaks = measured(whole, found)
    assert peaks.allocated == device.allocated
    assert peaks.requested < device.allocated
    assert peaks.reserved <= device.total <= budget
    assert device.context == CONTEXT
    assert device.workspace >= 3 * MiB
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.usefixtures("caching")
def test_a_plan_counts_what_no_tensor_uses_and_says_so() -> None:
    found = plan(model(), {0: 60 * MiB, "cpu": 10**9}, context_length=0)
    device = found.devices[0]
    assert device.allocated % 512 == 0
    assert device.total % (2 * MiB) == 0, "whole segments"
    assert 0 < device.unused < 2 * MiB
    assert "unused" in str(found)
    assert "24.00 MiB for its driver's context" in found.explain()
    assert ">unused" in found.to_html()


@pytest.mark.usefixtures("accelerators")
def test_without_a_caching_allocator_tensors_are_counted_to_the_byte() -> None:
    found = plan(model(), {0: 60 * MiB, "cpu": 10**9}, context_length=0)
    weights = sum(parameter.nbytes for parameter in model().parameters())
    assert (found.devices[0].weights, found.devices[0].unused) == (weights, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("caching")
def test_a_budget_is_of_reserved_bytes_when_a_plan_is_searched_for() -> None:
    """Every budget that a model does not fit whole is kept by streaming, or the host runs it all."""
    profile = llama_profile(32, 2, 2)
    whole = plan(profile, {0: 60 * MiB, "cpu": 10**9}).devices[0].total
    for budget in (whole, whole - 1, whole - 2 * MiB):
        found = plan(profile, {0: budget, "cpu": 10**9}, strategy="sequential")
        assert found.devices[0].total <= budget
        assert (found.devices[0].total == whole) == (budget == whole)


@pytest.mark.usefixtures("caching")
def test_devices_of_another_machine_are_counted_as_its_profile_says() -> None:
    from bigmodel.profile.machine.machine import nominal_machine

    assert caching_memories([0, "cpu", "cuda:3"]) == {0: CachingMemory(3 * MiB, CONTEXT)}
    elsewhere = CachingMemory(7, 8)
    known = nominal_machine().__class__(**{**vars(nominal_machine()), "caching": {"cuda:0": elsewhere}})
    assert caching_memories(["cuda:3", "cpu"], known) == {"cuda:3": elsewhere}


def test_cached_memory_is_given_back_at_the_limit() -> None:
    """Ten times 12 MiB and 14 MiB in turn: without a limit both stay cached; under one of 20 MiB, one of them."""
    for limit, peak in ((None, 26 * MiB), (20 * MiB, 14 * MiB)):
        memory = ReservedMemory(limit)
        for size in [12 * MiB, 14 * MiB] * 10:
            memory.change(size)
            memory.change(-size)
        assert (memory.peak, memory.limited) == (peak, limit is not None)


def test_a_cache_that_grows_leaves_segments_behind_unless_it_is_limited() -> None:
    """From 10 to 20 MiB each, in steps that no freed segment of an earlier size is large enough for."""
    small, large = ([InitialStorage(number, size * MiB, 0) for number in range(4)] for size in (10, 20))
    peaks = []
    for limit in (None, 110 * MiB):
        memory = ReservedMemory(limit)
        memory.begin(small)
        memory.begin(large)
        peaks.append(memory.peak)
    assert peaks[0] > 200 * MiB
    assert peaks[1] <= 110 * MiB


changes = st.lists(st.tuples(st.integers(1, 12 * MiB), st.booleans()), max_size=60)


@pytest.mark.slow
@given(changes)
@settings(max_examples=25)
def test_a_replay_reserves_what_the_virtual_accelerators_allocator_does(drawn: list[tuple[int, bool]]) -> None:
    """Tensors come, and the oldest goes: once in the replay, once on a device."""
    virtual.enable(1, strict=False, caching=virtual.Caching())
    memory, held, sizes = ReservedMemory(), [], []
    for number, (nbytes, frees) in enumerate(drawn):
        memory.change(block_bytes(nbytes), number)
        held.append(torch.empty(nbytes, dtype=torch.uint8, device="virtual:0"))
        sizes.append((block_bytes(nbytes), number))
        if frees:
            held.pop(0)
            nbytes, storage = sizes.pop(0)
            memory.change(-nbytes, storage)
    assert memory.peak == memory_peaks("virtual:0").reserved
    del held
    virtual.enable(1)
    virtual.disable()


@pytest.mark.slow
def test_a_budget_beyond_what_a_device_can_give_is_lowered_and_the_plan_says_so() -> None:
    """Its context takes 24 MiB of 64."""
    virtual.enable(1, capacity=64 * MiB, caching=virtual.Caching(context=CONTEXT))
    found = plan(llama_profile(32, 2, 2), {0: 64 * MiB, "cpu": 10**9})
    assert found.devices[0].budget == 40 * MiB
    assert "device 0 is planned with 40.00 MiB of its 64.00 MiB" in found.notes[0]
    within = plan(llama_profile(32, 2, 2), {0: 40 * MiB, "cpu": 10**9})
    assert (within.devices[0].budget, within.notes) == (40 * MiB, ())
    virtual.enable(1)
    virtual.disable()


@pytest.mark.usefixtures("caching")
def test_a_device_map_counts_segments_too_and_stats_report_all_three_peaks() -> None:
    whole = model(num_hidden_layers=1)
    reset_peak_memory(0)
    dispatch_model(whole, {"model": 0, "lm_head": "cpu"})
    found = get_plan(whole).devices[0]
    assert found.unused > 0
    stats = whole.dispatch_stats()["virtual:0"]
    assert stats["peak_requested"] < stats["peak_allocated"] == found.allocated
    assert stats["peak_reserved"] == found.total
    undispatch(whole)


@pytest.mark.usefixtures("caching")
def test_an_allocator_is_limited_while_a_model_is_dispatched_whose_budget_needs_it() -> None:
    whole = model(num_hidden_layers=1)
    found = plan(whole, {0: 60 * MiB, "cpu": 10**9}, context_length=0)
    assert not found.devices[0].limited
    limited = replace(found, devices={**found.devices, 0: replace(found.devices[0], limited=True)})
    large = partial(torch.empty, 60 * MiB, dtype=torch.uint8, device="virtual:0")
    dispatch_model(whole, limited)
    with pytest.raises(torch.OutOfMemoryError):
        large()
    undispatch(whole)
    assert large().nbytes == 60 * MiB
