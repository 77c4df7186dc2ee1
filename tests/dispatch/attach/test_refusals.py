"""A dispatched model refuses copies and conversions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model, prepare_training, undispatch
from bigmodel.dispatch.attach.attached_forward import AttachedForward
from bigmodel.dispatch.attach.refusals import RefuseConversion
from bigmodel.errors import DispatchError

from ...examples import alike

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
    with pytest.raises(DispatchError, match=r"cannot be moved or cast.*dtype= to from_pretrained"):
        module.half()


@pytest.mark.parametrize("trace", [torch.export.export, torch.jit.trace, lambda model, _: torch.jit.script(model)])
def test_a_streamed_model_is_not_traced_until_it_is_undispatched(
    trace: Callable[..., object], every_accelerator: None
) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), torch.ones(1, 2)
    dispatch_model(model, {"0": "cpu", "1": 0})
    with pytest.raises(DispatchError, match=r"exported, scripted or traced.*undispatch\(model\)"):
        trace(model, (x,))
    assert not hasattr(model[0].forward, "__code__")
    trace(undispatch(model), (x,))


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


class CastsBuffers(CastsItself):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.float()
        assert self.scale.dtype == self.statistics.running_mean.dtype == torch.float32
        return self.statistics(self.linear(x.float()) * self.scale).to(x.dtype)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("device_map", DEVICE_MAPS, ids=str)
def test_buffers_are_cast_in_a_forward(device_map: dict[str, int | str], offload_buffers: bool) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    model, reference = casting(CastsBuffers), casting(CastsBuffers).to("virtual:0")
    with torch.no_grad():
        expected = reference(x.to("virtual:0")).cpu()
        dispatch_model(model, device_map, main_device=0, offload_buffers=offload_buffers)
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("device_map", DEVICE_MAPS, ids=str)
def test_statistics_that_are_cast_in_a_forward_keep_what_it_writes(device_map: dict[str, int | str]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    model, reference = casting(CastsBuffers).train(), casting(CastsBuffers).to("virtual:0").train()
    dispatch_model(model, device_map, main_device=0)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x).cpu(), reference(x.to("virtual:0")).cpu())
    for buffer, expected in zip(model.buffers(), reference.buffers(), strict=True):
        assert buffer.dtype == expected.dtype
        assert torch.equal(buffer.cpu(), expected.cpu())


@pytest.mark.usefixtures("accelerators")
def test_streamed_statistics_that_are_cast_and_written_are_refused() -> None:
    model = dispatch_model(casting(CastsBuffers).train(), {"": "cpu"}, main_device=0, offload_buffers=True)
    with torch.no_grad(), pytest.raises(DispatchError, match="offload_buffers=False"):
        model(torch.ones(2, 8, dtype=torch.bfloat16))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("device_map", DEVICE_MAPS[:2], ids=str)
@alike("part", [CastsItself, CastsAPart, CastsBuffers, CastsALayerOfItsOwn], first=3)
def test_gradients_flow_through_frozen_weights_that_are_cast_and_to_resident_ones(
    part: type[nn.Module], device_map: dict[str, int | str]
) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    model, reference = casting(part), casting(part)
    for each in (model, reference):
        each[1].requires_grad_(False)
    trained = dict(reference.to("virtual:0").named_parameters())
    dispatch_model(model, device_map, main_device=0)
    parameters = dict(model.named_parameters())
    with_gradients = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for _ in range(2):
        for each, given in zip((model, reference), with_gradients, strict=True):
            each(given.to("virtual:0")).float().square().sum().backward()
    assert torch.equal(with_gradients[0].grad, with_gradients[1].grad)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert (parameter.grad is None) == (trained[name].grad is None)
        if parameter.grad is not None:
            assert parameter.grad.dtype == trained[name].grad.dtype
            assert torch.equal(parameter.grad.cpu(), trained[name].grad.cpu())


@pytest.mark.usefixtures("accelerators")
def test_a_streamed_weight_that_is_cast_in_forward_is_not_trained() -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = casting(CastsItself).to("virtual:0")(x.to("virtual:0")).cpu()
    model = dispatch_model(casting(CastsItself), {"": "cpu"}, main_device=0)
    output = model(x)
    assert torch.equal(output.cpu(), expected)
    with pytest.raises(DispatchError, match="cannot be trained"):
        output.float().sum().backward()
    weights = model.state_dict()
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


@pytest.mark.usefixtures("accelerators")
def test_training_streamed_weights_that_are_cast_in_forward_is_refused_before_it_begins() -> None:
    model = dispatch_model(casting(CastsItself), {"0": 0, "1": "cpu", "2": 1}, main_device=0)
    with pytest.raises(
        DispatchError, match=r"^1\.part\..* cannot be trained .* forward of '1.part' casts it to float32"
    ):
        prepare_training(model, model.parameters())
    model[1].requires_grad_(False)
    assert not prepare_training(model, [p for p in model.parameters() if p.requires_grad])
    float32 = dispatch_model(casting(CastsItself).float(), {"": "cpu"}, main_device=0)
    assert not prepare_training(float32, float32.parameters())


class CastsItsHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._logits(self.body(x))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head.float()(x.float())  # type: ignore[no-any-return]


@pytest.mark.usefixtures("accelerators")
def test_a_part_that_another_casts_is_cast_where_it_is_resident_and_refused_where_it_would_be_streamed() -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()

    def made() -> nn.Module:
        torch.manual_seed(0)
        return CastsItsHead().bfloat16()

    model = made()
    with pytest.raises(DispatchError, match=r"casts head\.weight to float32, which would be streamed"):
        dispatch_model(model, {"body": 0, "head": "cpu"}, main_device=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected = made().to("virtual:0")(x.to("virtual:0")).cpu()
    maps: list[dict[str, int | str]] = [{"body": 0, "head": 1}, {"body": "cpu", "head": 1}]
    for device_map in maps:
        assert torch.equal(dispatch_model(made(), device_map, main_device=0)(x).cpu(), expected)


class WritesWhatItCasts(CastsItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.float()
        self.linear.bias += 1
        return super().forward(x)


@pytest.mark.usefixtures("accelerators")
def test_a_streamed_weight_that_is_cast_and_written_is_refused() -> None:
    model = dispatch_model(casting(WritesWhatItCasts), {"": "cpu"}, main_device=0)
    with torch.no_grad(), pytest.raises(DispatchError, match="is cast in the forward and written"):
        model(torch.ones(2, 8, dtype=torch.bfloat16))


class MovesItself(CastsItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to("meta")
        return x


@pytest.mark.usefixtures("accelerators")
def test_parts_that_move_are_refused() -> None:
    model = dispatch_model(casting(MovesItself), {"": "cpu"}, main_device=0)
    with torch.no_grad(), pytest.raises(DispatchError, match="cannot be moved or cast"):
        model(torch.ones(2, 8, dtype=torch.bfloat16))
    assert {value.device.type for value in model.parameters()} == {"cpu"}
