"""What a dispatched model carries, and the way back."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.attach.dispatched import UndoLog, dispatched, quantization_errors
from bigmodel.errors import DispatchError

from ...accelerators import at, held
from ..models import ids, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")


def test_a_plain_model_carries_nothing() -> None:
    assert dispatched(stack()) is None
    assert quantization_errors(stack()) == {}


def test_a_dispatched_model_knows_its_map_its_names_and_its_ties() -> None:
    found = dispatched(dispatch_model(stack(), {"": 0, "blocks": "cpu"}))
    assert found is not None
    assert str(found.main_device) == at(0)
    assert found.resolved.keys == {"": 0, "blocks": "cpu"}
    assert found.plan.device_map["blocks.3"] == "cpu"
    assert found.ties == {"head.weight": "embed.weight"}
    assert "blocks.3.down.bias" in found.names


def test_the_map_that_pipelines_read_begins_with_a_device_that_tensors_can_be_on(tmp_path: Path) -> None:
    places = {"embed": "disk", "head": "disk", "blocks": "cpu", "": 0}
    model = dispatch_model(stack(), places, offload_dir=tmp_path)
    assert list(model.hf_device_map.values()) == [0, "cpu", "disk", "disk"]
    assert model.hf_device_map == places


def test_moved_bytes_are_counted_by_the_tier_they_moved_to() -> None:
    model = dispatch_model(stack(), {"": 0, "blocks": "cpu"})
    model(ids())
    stats = model.dispatch_stats()
    assert set(stats) == {at(0)}
    assert stats[at(0)]["bytes_from_ram"] >= sum(p.nbytes for p in model.blocks.parameters())


def test_detached_and_released_the_model_is_plain_and_the_device_free() -> None:
    model = dispatch_model(stack(), {"": "cpu"}, main_device=0, offload_buffers=True)
    found = dispatched(model)
    assert found is not None
    found.detach(model)
    found.release()
    del found
    gc.collect()
    assert held(0) == 0
    assert dispatched(model) is None
    assert not hasattr(model, "hf_device_map")
    assert all("forward" not in module.__dict__ and "_apply" not in module.__dict__ for module in model.modules())
    assert torch.equal(model(ids()), stack()(ids()))


@pytest.mark.parametrize("attempt", [copy.deepcopy, pickle.dumps])
def test_the_dispatched_state_is_not_copied(attempt: object) -> None:
    with pytest.raises(DispatchError, match="undispatch"):
        attempt(dispatched(dispatch_model(stack(), {"": 0})))  # type: ignore[operator]


def test_a_log_puts_everything_back_the_last_first() -> None:
    registry, first = {"weight": torch.zeros(1)}, torch.zeros(1)
    registry["weight"] = first
    log = UndoLog()
    for value in (1.0, 2.0):
        log.replace(registry, "weight", torch.full((1,), value))
    assert registry["weight"].item() == 2
    log.undo()
    assert registry["weight"] is first


@pytest.mark.parametrize("nested", [False, True])
def test_an_encoder_whose_layers_torch_does_not_probe_is_prefetched_across_calls(nested: bool) -> None:
    """Writes through ``.data`` show in the next call either way."""

    def made() -> nn.TransformerEncoder:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested).eval()

    values, plain, model = torch.randn(2, 5, 16), made(), dispatch_model(made(), {"": "cpu"}, main_device=0)
    with torch.no_grad():
        for _ in range(2):
            model(values)
        before = model.dispatch_stats()[at(0)]
        for factor in (2.0, 0.5):
            for encoder in (plain, model):
                for layer in encoder.layers:
                    layer.linear1.weight.data.mul_(factor)
            expected = plain.to(at(0))(values.to(at(0))).cpu()
            plain.cpu()
            assert torch.equal(model(values), expected)
        written = model.dispatch_stats()[at(0)]
        for _ in range(2):
            model(values)
        after = model.dispatch_stats()[at(0)]
    assert written["misses"] > before["misses"]
    assert (after["misses"] - written["misses"] == 0) == (not nested)
