"""A dispatched model refuses copies and conversions."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.dispatch.attach.attached_forward import AttachedForward
from bigmodel.dispatch.attach.refusals import RefuseConversion
from bigmodel.errors import DispatchError

CPU = torch.device("cpu")


@pytest.mark.parametrize("attempt", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("thing", [AttachedForward(nn.ReLU(), None, None), RefuseConversion(nn.ReLU(), ())])
def test_what_is_attached_is_neither_copied_nor_pickled(attempt: object, thing: object) -> None:
    with pytest.raises(DispatchError, match="undispatch"):
        attempt(thing)  # type: ignore[operator]


def test_only_conversions_that_change_nothing_are_accepted() -> None:
    module = nn.Linear(2, 2)
    module.__dict__["_apply"] = RefuseConversion(module, {CPU})
    assert module.to("cpu") is module
    with pytest.raises(DispatchError, match="cannot be moved or cast"):
        module.half()


class CastsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.float()
        return self.norm(self.linear(x.float())).to(x.dtype)  # type: ignore[no-any-return]


class CastsAPart(CastsItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear = self.linear.float()
        return self.norm(self.linear(x.float()).to(x.dtype))  # type: ignore[no-any-return]


class CastsALayerOfItsOwn(CastsItself):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recurrent.float()
        return self.norm(self.linear(self.recurrent(x.float())[0].to(x.dtype)))  # type: ignore[no-any-return]


class Adds(nn.Module):
    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.part = part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x)  # type: ignore[no-any-return]


def casting(part: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adds(part) for _ in range(3))).bfloat16().eval()


DEVICE_MAPS: list[dict[str, int | str]] = [
    {"0": 0, "1": "cpu", "2": 1},
    {"0": 0, "1.part": "cpu", "2": 0},
    {"": "cpu"},
]


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("device_map", DEVICE_MAPS, ids=str)
@pytest.mark.parametrize("part", [CastsItself, CastsAPart, CastsALayerOfItsOwn])
def test_parts_that_cast_in_their_forward_compute_as_they_do_undispatched(
    part: type[nn.Module], device_map: dict[str, int | str]
) -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    model, reference = casting(part), casting(part).to("virtual:0")
    with torch.no_grad():
        expected = reference(x.to("virtual:0")).cpu()
        dispatch_model(model, device_map, main_device=0)
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)
    with pytest.raises(DispatchError, match="cannot be moved or cast"):
        model.half()
    with pytest.raises(DispatchError, match="cannot be moved or cast"):
        model[1].half()
    undispatch(model)
    with torch.no_grad():
        assert torch.equal(model.to("virtual:0")(x.to("virtual:0")).cpu(), expected)


@pytest.mark.usefixtures("accelerators")
def test_a_streamed_weight_that_is_trained_is_not_cast_in_forward() -> None:
    model = dispatch_model(casting(CastsItself), {"": "cpu"}, main_device=0)
    with pytest.raises(DispatchError, match="cannot be moved or cast"):
        model(torch.ones(2, 8, dtype=torch.bfloat16))
    weights = model.state_dict()
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


class MovesItself(CastsItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to("meta")
        return x


class CastsABuffer(CastsItself):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("part", [MovesItself, CastsABuffer])
def test_parts_that_move_or_cast_buffers_are_refused(part: type[nn.Module]) -> None:
    model = dispatch_model(casting(part), {"": "cpu"}, main_device=0)
    with torch.no_grad(), pytest.raises(DispatchError, match="cannot be moved or cast"):
        model(torch.ones(2, 8, dtype=torch.bfloat16))
    assert {value.device.type for value in model.parameters()} == {"cpu"}
