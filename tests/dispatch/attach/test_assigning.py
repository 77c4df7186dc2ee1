"""Weights that are loaded into a dispatched model with ``assign=True`` stay on their devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, undispatch

from ...accelerators import at, two

pytestmark = pytest.mark.usefixtures("every_accelerator")

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
MAPS: dict[str, dict[str, Any]] = {
    "streamed": {"": "cpu"},
    "partly streamed": {"0": 0, "2": "cpu"},
    "two accelerators": {"0": 0, "2": 1},
}
WHERE = [pytest.param(name, marks=two) if name.startswith("two") else name for name in MAPS]


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()


def dispatched_model(where: str) -> nn.Sequential:
    model = model_of(0)
    device_map = {**MAPS[where], **({} if "" in MAPS[where] else {"1": 0})}
    dispatch_model(model, device_map, main_device=0)
    return model


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("source", ["host", "accelerator"])
def test_the_next_forward_computes_with_them(where: str, source: str) -> None:
    model, other = dispatched_model(where), model_of(1)
    devices = [tensor.device for tensor in model.state_dict().values()]
    state = {key: value.to("cpu" if source == "host" else at(0)) for key, value in other.state_dict().items()}
    with torch.no_grad():
        missing, unexpected = model.load_state_dict(state, assign=True)
        assert not missing
        assert not unexpected
        found = model(X)
        assert torch.equal(found.cpu(), copy.deepcopy(other).to(at(0))(X.to(at(0))).cpu())
        assert [tensor.device for tensor in model.state_dict().values()] == devices
        assert torch.equal(model(X), found)


def test_a_part_is_loaded_so_too() -> None:
    model, other = dispatched_model("partly streamed"), model_of(1)
    part = model[0]
    assert isinstance(part, nn.Linear)
    kept = part.weight
    part.load_state_dict(other[0].state_dict(), assign=True)
    assert part.weight is kept
    assert torch.equal(kept.detach().cpu(), other[0].weight.detach())


def test_tensors_that_lie_where_the_weights_do_take_their_place() -> None:
    model, other = dispatched_model("streamed"), model_of(1)
    state = other.state_dict()
    model.load_state_dict(state, assign=True)
    assert model[0].weight.data_ptr() == state["0.weight"].data_ptr()


def test_copies_load_so_and_plain_models_as_they_did() -> None:
    model, other = dispatched_model("partly streamed"), model_of(1)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        before = model(X)
        copied.load_state_dict(other.state_dict(), assign=True)
        assert not torch.equal(copied(X), before)
        assert torch.equal(model(X), before)
    plain = undispatch(model)
    assert all("_load_from_state_dict" not in vars(module) for module in plain.modules())
