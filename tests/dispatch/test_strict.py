"""Dispatched models on a device as asynchronous as a GPU: whenever copies arrive, bits are equal, and nothing races."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from bigmodel.devices import virtual
from bigmodel.dispatch import dispatch_model, get_plan, undispatch
from bigmodel.dispatch.streaming.streamer import Streamer
from bigmodel.dispatch.weights.block import Block, HostTensor
from tests.examples import few

from .mixtures import mixtral, tokens
from .models import ids, stack

DEVICE = "virtual:0"

Schedule = tuple[int | None, bool]
LATEST: Schedule = None, True

schedules = st.tuples(st.one_of(st.none(), st.integers(0, 2**16)), st.booleans())
"""Copies as late as they may be, or each late or early by a seed; and whether computation is late too."""

many = settings(max_examples=few(2), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

pytestmark = pytest.mark.usefixtures("accelerators")


def strict(schedule: Schedule) -> None:
    seed, late_compute = schedule
    virtual.enable(count=2, strict=True, seed=seed, late_compute=late_compute)


def streamed(model: nn.Module, device_map: dict[str, Any], slots: int, **options: Any) -> nn.Module:
    """Dispatch `model` with so many slots."""
    dispatch_model(model, device_map, main_device=0, **options)
    plan = replace(get_plan(model), slots=slots)
    undispatch(model)
    return dispatch_model(model, plan, main_device=0, **options)


def outputs(model: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = [model(each) for each in inputs]
    return [getattr(each, "logits", each).cpu() for each in found]


@pytest.mark.slow
@many
@given(
    schedule=schedules,
    slots=st.integers(1, 4),
    device_map=st.sampled_from([{"": "cpu"}, {"": 0, "blocks.1": "cpu", "blocks.3": "cpu"}, {"": "cpu", "norm": 1}]),
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
@example(schedule=LATEST, slots=1, device_map={"": "cpu"}, rows=[3, 2])
@example(schedule=LATEST, slots=2, device_map={"": "cpu", "norm": 1}, rows=[3, 2])
def test_streamed_blocks_give_the_same_bits(schedule: Schedule, slots: int, device_map: Any, rows: list[int]) -> None:
    strict(schedule)
    inputs = [ids(count) for count in rows]
    expected = outputs(stack(width=64), inputs)
    model = streamed(stack(width=64), device_map, slots)
    assert all(map(torch.equal, outputs(model, inputs), expected))


@pytest.mark.slow
@many
@given(schedule=schedules, slots=st.integers(1, 3))
@example(schedule=LATEST, slots=2)
def test_blocks_read_from_disk_give_the_same_bits(tmp_path_factory: Any, schedule: Schedule, slots: int) -> None:
    strict(schedule)
    inputs = [ids(3), ids(2)]
    expected = outputs(stack(width=64), inputs)
    folder: Path = tmp_path_factory.mktemp("weights")
    model = streamed(stack(width=64), {"": "disk"}, slots, offload_dir=folder)
    assert all(map(torch.equal, outputs(model, inputs), expected))


@pytest.mark.long
@pytest.mark.slow
@many
@given(schedule=schedules, slots=st.integers(1, 3))
@example(schedule=LATEST, slots=2)
def test_quantised_blocks_give_the_same_bits_each_time(schedule: Schedule, slots: int) -> None:
    pytest.importorskip("torchao")
    strict((None, False))
    inputs = [ids(3), ids(2)]
    expected = outputs(dispatch_model(stack(width=64), {"": "cpu"}, main_device=0, offload_dtype="int8"), inputs)
    strict(schedule)
    model = streamed(stack(width=64), {"": "cpu"}, slots, offload_dtype="int8")
    assert all(map(torch.equal, outputs(model, inputs), expected))


EXPERT_BYTES = 3 * 32 * 64 * 4


@pytest.mark.slow
@many
@given(schedule=schedules, slots=st.integers(1, 12), function=st.sampled_from(["eager", "grouped_mm", "batched_mm"]))
@example(schedule=LATEST, slots=2, function="eager")
@example(schedule=(None, False), slots=4, function="eager")
def test_experts_give_the_same_bits(schedule: Schedule, slots: int, function: str) -> None:
    strict(schedule)
    inputs = [tokens(6), tokens(3)]
    resident = mixtral()
    resident.set_experts_implementation(function)
    expected = outputs(resident.to(DEVICE), [each.to(DEVICE) for each in inputs])
    model = mixtral()
    model.set_experts_implementation(function)
    dispatch_model(model, {"": "cpu"}, main_device=0, expert_cache=slots * EXPERT_BYTES)
    assert all(map(torch.equal, outputs(model, inputs), expected))


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters after three steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    device = next(model.parameters()).device
    for step in range(3):
        model(ids(3 + step).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.long
@pytest.mark.slow
@many
@given(schedule=schedules, slots=st.integers(1, 3))
@example(schedule=LATEST, slots=2)
def test_training_gives_the_same_bits(schedule: Schedule, slots: int) -> None:
    """The optimizer writes to weights while the next forward's first blocks are being prefetched."""
    strict(schedule)
    expected = trained(stack(width=16).train().to(DEVICE))
    model = streamed(stack(width=16).train(), {"": "cpu"}, slots)
    assert all(map(torch.equal, trained(model), expected))


@pytest.mark.parametrize("options", [{}, {"offload_dtype": "int8"}])
def test_memory_that_a_prefetch_writes_to_is_not_given_to_others(options: dict[str, Any]) -> None:
    """After a forward the first blocks are fetched again: the model may be deleted while that is under way."""
    if options:
        pytest.importorskip("torchao")
    model = dispatch_model(stack(width=64), {"": "cpu"}, main_device=0, **options)
    model(ids())
    del model
    gc.collect()
    assert virtual.races() == []


@pytest.mark.slow
def test_a_model_can_be_undispatched_while_a_prefetch_is_under_way() -> None:
    model, expected = stack(width=64), outputs(stack(width=64), [ids()])
    for device_map in ({"": "cpu"}, {"": 1, "blocks.1": "cpu"}, {"": "cpu", "head": 0}):
        dispatch_model(model, device_map, main_device=0)
        assert all(map(torch.equal, outputs(model, [ids()]), expected))
        undispatch(model)
    assert virtual.races() == []


def test_a_slot_of_one_visit_may_be_given_up_while_its_fetch_is_under_way() -> None:
    """A forward that is interrupted while it waits frees the slot."""
    registry = {"weight": torch.ones(8)}
    block = Block("block", [HostTensor(registry["weight"], torch.float32, [(registry, "weight")])])
    block.pack(pin=True)
    streamer = Streamer(torch.device(DEVICE), [block])
    slot = streamer._slots.transient(block, streamer.device)
    streamer._slots.fetch(block, slot)
    streamer._slots.forget(slot)
    del slot
    gc.collect()
    assert virtual.races() == []
