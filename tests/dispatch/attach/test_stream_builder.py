"""Streamed blocks get slots on their device, and their host tensors one place that one copy reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.attach.dispatched import Dispatched, dispatched
from bigmodel.dispatch.dispatch import place_and_attach
from bigmodel.dispatch.placement.options import Options, PlanArguments
from bigmodel.dispatch.placement.resolve import resolve_given

from ..models import stack

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
