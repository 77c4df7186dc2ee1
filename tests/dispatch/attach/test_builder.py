"""From a map to what becomes resident, what is streamed and what needs an attachment; or the model as it was.

Whole models that compute on the host with weights on disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import mapped_region
from bigmodel.dispatch import disk_offload, dispatch_model, undispatch
from bigmodel.dispatch.attach.attached_forward import AttachedForward
from bigmodel.dispatch.attach.builder import Builder
from bigmodel.dispatch.attach.dispatched import Dispatched, dispatched
from bigmodel.dispatch.placement.options import Options, PlanArguments
from bigmodel.dispatch.placement.resolve import resolve_given
from bigmodel.errors import CheckpointFormatError, DeviceMapError, DispatchError

from ..models import ids, llama, stack

pytestmark = pytest.mark.usefixtures("accelerators")


def built(model: nn.Module, device_map: dict[str, object], **options: object) -> Dispatched:
    resolved = resolve_given(model, device_map, PlanArguments(**options))  # type: ignore[arg-type]
    return Builder(model, resolved, Options()).build()


def streamed(result: Dispatched) -> list[str]:
    return [block.name for streamer in result.streamers for block in streamer.blocks]


def test_nothing_is_attached_until_it_is_said() -> None:
    model = stack()
    result = built(model, {"": 0, "blocks": "cpu"})
    assert result.attachments
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_parts_mapped_to_an_accelerator_are_there_and_the_rest_is_streamed() -> None:
    model = stack()
    result = built(model, {"": 0, "blocks.1": "cpu", "blocks.3": "cpu"})
    assert streamed(result) == ["blocks.1", "blocks.3"]
    assert str(model.blocks[0].up.weight.device) == "virtual:0"
    assert model.blocks[1].up.weight.device.type == "cpu"


def test_streamed_blocks_lie_in_one_packed_buffer_each() -> None:
    model = stack()
    built(model, {"": 0, "blocks.1": "cpu"})
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.blocks[1].parameters()}
    assert len(storages) == 1


def test_a_tied_weight_that_is_resident_elsewhere_is_not_streamed() -> None:
    model = stack()
    result = built(model, {"": 0, "head": "cpu"})
    assert streamed(result) == []
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("start", ["cpu", "virtual:0", "virtual:1"])
def test_a_tied_weight_that_is_mapped_to_two_accelerators_is_on_both(start: str) -> None:
    model = stack().to(start)
    built(model, {"": 0, "head": 1})
    assert (str(model.embed.weight.device), str(model.head.weight.device)) == ("virtual:0", "virtual:1")
    assert torch.equal(model.embed.weight.cpu(), model.head.weight.cpu())


def test_on_the_host_alone_nothing_is_done() -> None:
    model = stack()
    before = list(model.parameters())
    result = built(model, {"": "cpu"})
    assert (result.attachments, result.streamers) == ({}, [])
    assert all(one is other for one, other in zip(model.parameters(), before))


def test_weights_that_are_cast_are_streamed_to_the_host_too() -> None:
    result = built(stack(), {"": "cpu"}, dtype=torch.float64)
    assert [streamer.device.type for streamer in result.streamers] == ["cpu"]


def test_slots_are_no_more_than_blocks() -> None:
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
def test_impossible_maps_are_refused_with_the_model_as_it_was(
    change: object, device_map: dict[str, object], error: type[Exception]
) -> None:
    model = change(stack())  # type: ignore[operator]
    before = list(model.parameters())
    with pytest.raises(error):
        built(model, device_map)
    assert all(one is other for one, other in zip(model.parameters(), before))


@pytest.mark.slow
def test_the_model_computes_the_same_with_its_weights_on_disk(tmp_path: Path) -> None:
    plain, model = llama(), disk_offload(llama(), tmp_path, "cpu")
    tokens = torch.arange(10)[None]
    assert mapped_region(model.model.layers[0].mlp.up_proj.weight) is not None
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-5)
    assert dispatched(model).readers[0].stats.hits > 0  # type: ignore[union-attr]


def test_only_what_lies_on_disk_is_attached_to(tmp_path: Path) -> None:
    model = stack()
    device_map = {"": "cpu", "blocks.1": "disk", "blocks.3": "disk"}
    dispatch_model(model, device_map, offload_dir=tmp_path)
    attached = [name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), AttachedForward)]
    assert attached == ["blocks.1", "blocks.3"]
    assert torch.allclose(model(ids()), stack()(ids()), atol=1e-6)
    undispatch(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_an_embedding_on_disk_is_looked_up_and_not_brought_in(tmp_path: Path) -> None:
    model = llama()
    dispatch_model(model, {"": "cpu", "model.embed_tokens": "disk"}, offload_dir=tmp_path)
    (reader,) = dispatched(model).readers  # type: ignore[union-attr]
    assert [(block.name, block.nbytes) for block in reader.blocks] == [("model.embed_tokens", 0)]


def test_weights_can_be_trained_where_they_lie(tmp_path: Path) -> None:
    plain, model = stack(), disk_offload(stack(), tmp_path, "cpu")
    for trained in (plain, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(3):
            trained(ids()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(plain.parameters(), model.parameters()):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_file_cut_short_fails_the_forward_and_leaves_the_process_alive(tmp_path: Path) -> None:
    from bigmodel.checkpoint import save_model
    from bigmodel.dispatch import load_checkpoint_and_dispatch

    save_model(llama(), tmp_path)
    model = load_checkpoint_and_dispatch(llama(), tmp_path, {"": "disk"})
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        model(tokens)
        path = tmp_path / "model.safetensors"
        with path.open("rb+") as file:
            file.truncate(path.stat().st_size // 2)
        with pytest.raises(CheckpointFormatError, match="cut short"):
            model(tokens)
