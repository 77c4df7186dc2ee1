"""From a map to what becomes resident, what is streamed and what needs an attachment; or the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.dispatch.build import Builder
from bigmodel.dispatch.device_map import ResolvedMap
from bigmodel.dispatch.dispatched import Dispatched
from bigmodel.dispatch.options import Options
from bigmodel.errors import DeviceMapError, DispatchError

from .models import stack

pytestmark = pytest.mark.usefixtures("accelerators")


def built(model: nn.Module, device_map: dict[str, object], **options: object) -> Dispatched:
    return Builder(model, ResolvedMap(device_map), Options(**options)).build()  # type: ignore[arg-type]


def streamed(result: Dispatched) -> list[str]:
    return [block.name for streamer in result.streamers for block in streamer.blocks]


def test_nothing_is_attached_until_it_is_said() -> None:
    model = stack()
    result = built(model, {"": 0, "blocks": "cpu"})
    assert result.attachments
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_what_the_map_puts_on_an_accelerator_is_there_and_the_rest_is_streamed() -> None:
    model = stack()
    result = built(model, {"": 0, "blocks.1": "cpu", "blocks.3": "cpu"})
    assert streamed(result) == ["blocks.1", "blocks.3"]
    assert str(model.blocks[0].up.weight.device) == "virtual:0"
    assert model.blocks[1].up.weight.device.type == "cpu"


def test_what_is_streamed_lies_in_one_piece_each() -> None:
    model = stack()
    built(model, {"": 0, "blocks.1": "cpu"})
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.blocks[1].parameters()}
    assert len(storages) == 1


def test_a_tied_weight_that_is_resident_elsewhere_is_not_streamed() -> None:
    model = stack()
    result = built(model, {"": 0, "head": "cpu"})
    assert streamed(result) == []
    assert model.head.weight is model.embed.weight


def test_on_the_host_alone_nothing_is_done() -> None:
    model = stack()
    before = list(model.parameters())
    result = built(model, {"": "cpu"})
    assert (result.attachments, result.streamers) == ({}, [])
    assert all(one is other for one, other in zip(model.parameters(), before))


def test_weights_that_are_cast_are_streamed_to_the_host_too() -> None:
    result = built(stack(), {"": "cpu"}, dtype=torch.float64)
    assert [streamer.device.type for streamer in result.streamers] == ["cpu"]


def test_there_are_no_more_slots_than_blocks() -> None:
    one, many = (
        built(stack(), {"": 0, **dict.fromkeys(names, "cpu")}, slots=3) for names in (["blocks.0"], ["blocks"])
    )
    block = one.streamers[0].slot_bytes
    assert many.streamers[0].slot_bytes == 3 * block


@pytest.mark.parametrize(
    ("change", "device_map", "error"),
    [
        (lambda model: model.to("meta"), {"": 0}, DispatchError),
        (lambda model: model, {"": 0, "blocks.1.up.bias": 1}, DeviceMapError),
    ],
)
def test_what_cannot_be_is_refused_with_the_model_as_it_was(
    change: object, device_map: dict[str, object], error: type[Exception]
) -> None:
    model = change(stack())  # type: ignore[operator]
    before = list(model.parameters())
    with pytest.raises(error):
        built(model, device_map)
    assert all(one is other for one, other in zip(model.parameters(), before))
