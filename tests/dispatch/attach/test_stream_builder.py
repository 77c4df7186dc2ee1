"""Streamed blocks get slots on their device, and their host tensors one place that one copy reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.attach.dispatched import Dispatched, dispatched
from bigmodel.dispatch.dispatch import place_and_attach
from bigmodel.dispatch.placement.options import Options, PlanArguments
from bigmodel.dispatch.placement.resolve import resolve_given

from ...accelerators import at, two
from ..models import ids, in_turns, resident_output, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")


def carried(model: nn.Module, below: dict[str, int] | None = None, **arguments: object) -> Dispatched:
    asked = PlanArguments(**arguments)  # type: ignore[arg-type]
    resolved = resolve_given(model, {"": 0, "blocks": "cpu"}, asked, computed_below=below)
    found = dispatched(place_and_attach(model, resolved, Options()))
    assert found is not None
    return found


def storages(module: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}


def test_all_blocks_of_a_device_take_turns_in_the_same_slots() -> None:
    found = carried(stack(), slots=3)
    (streamer,) = found.streamers
    assert [block.name for block in streamer.blocks] == [f"blocks.{n}" for n in range(4)]
    assert streamer.slot_bytes == 3 * streamer.blocks[0].layout.nbytes


def test_a_blocks_tensors_lie_in_one_place_unless_they_are_cast_on_their_way() -> None:
    packed, cast = stack(), stack()
    carried(packed)
    carried(cast, dtype=torch.float64)
    assert len(storages(packed.blocks[0])) == 1
    assert len(storages(cast.blocks[0])) == 4


def test_weights_shared_by_two_blocks_stay_where_they_are() -> None:
    model = stack()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    carried(model)
    assert model.blocks[1].up.weight is model.blocks[0].up.weight
    assert len(storages(model.blocks[0])) == 4
    assert len(storages(model.blocks[2])) == 1


def test_a_block_is_computed_on_the_host_with_few_tokens_where_the_map_says_so() -> None:
    found = carried(stack(), {"blocks.1": 5})
    assert [name for name, each in found.attachments.items() if each.host_or_device is not None] == ["blocks.1"]


def test_on_the_host_nothing_is_packed() -> None:
    model = stack()
    before = storages(model)
    dispatch_model(model, {"": "cpu"})
    assert storages(model) == before


@two
@torch.no_grad()
def test_blocks_of_two_accelerators_have_slots_and_links_of_their_own() -> None:
    model = stack()
    expected = resident_output(model, ids())
    dispatch_model(model, in_turns(model, "blocks"))
    found = dispatched(model)
    assert found is not None
    names = [[block.name for block in streamer.blocks] for streamer in found.streamers]
    assert names == [["blocks.0", "blocks.2"], ["blocks.1", "blocks.3"]]
    assert torch.equal(model(ids()).cpu(), expected)
    assert {model.dispatch_stats()[at(index)]["misses"] for index in range(2)} == {1}
    assert torch.equal(model(ids()).cpu(), expected)
    assert torch.equal(undispatch(model)(ids()), stack()(ids()))


@two
def test_the_links_of_two_accelerators_fetch_blocks_side_by_side() -> None:
    model = stack(depth=8)
    dispatch_model(model, in_turns(model, "blocks"))
    for _ in range(2):
        model(ids())
    for index in range(2):
        counters = model.dispatch_stats()[at(index)]
        assert counters["fetches"] >= 4
        assert counters["bytes_from_ram"] > 0


@two
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_blocks_on_two_accelerators_are_those_of_the_resident_model(training: bool) -> None:
    resident, model = stack().to(at(0)).train(training), stack().train(training)
    resident(ids().to(at(0))).square().sum().backward()
    dispatch_model(model, in_turns(model, "blocks"))
    model(ids()).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), resident.parameters(), strict=True):
        assert one.grad is not None, name
        assert torch.equal(one.grad.cpu(), other.grad.cpu()), name


@two
def test_weights_are_quantised_for_both_links() -> None:
    pytest.importorskip("torchao")
    model = stack(width=64)
    made = replace(in_turns(model, "blocks"), offload_dtype="int8")
    dispatch_model(model, made)
    model(ids())
    for index in range(2):
        assert model.dispatch_stats()[at(index)]["quantization_error_max"] > 0
