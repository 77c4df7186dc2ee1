"""What cannot be dispatched as a map says is refused in one line, and nothing has moved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.errors import DispatchError

pytestmark = pytest.mark.usefixtures("accelerators")

MAPS: list[Any] = [{"": "cpu"}, {"": "disk"}, {"0": 0, "1": 1}]


class Sparse(nn.Linear):
    """Multiplies by a sparse weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight @ x.T).T


def sparse() -> nn.Module:
    layer = Sparse(4, 4, bias=False)
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse(), requires_grad=False)
    return nn.Sequential(layer, nn.Linear(4, 4))


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))


def assert_untouched(model: nn.Module) -> None:
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("device_map", MAPS)
def test_sparse_weights_are_neither_streamed_nor_moved(device_map: dict[str, object], tmp_path: Path) -> None:
    model = sparse()
    with pytest.raises(DispatchError, match=r"0\.weight is a tensor of several parts \(sparse_coo\)"):
        dispatch_model(model, device_map, main_device=0, offload_dir=tmp_path)
    assert_untouched(model)
    assert_untouched(dispatch_model(model, {"": "cpu"}))


@pytest.mark.parametrize("device_map", MAPS)
def test_torchscript_modules_are_not_attached_to(device_map: dict[str, object], tmp_path: Path) -> None:
    model = scripted()
    with pytest.raises(DispatchError, match="'0' is a TorchScript module"):
        dispatch_model(model, device_map, main_device=0, offload_dir=tmp_path)
    assert_untouched(model)
    assert_untouched(dispatch_model(model, {"": "cpu"}))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}])
def test_weights_that_torchao_quantised_are_not_streamed(device_map: dict[str, object], tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(DispatchError, match=r"0\.weight is a tensor of several parts \(\w*Tensor\)"):
        dispatch_model(model, device_map, main_device=0, offload_dir=tmp_path)
    assert_untouched(model)


ATTACHED: list[tuple[dict[str, object], dict[str, Any]]] = [
    ({"": "disk"}, {}),
    ({"": "cpu"}, {"main_device": 0, "offload": "compute"}),
    ({"0": 0, "1": "cpu"}, {"main_device": 0}),
    ({"": 0}, {"force_hooks": True}),
]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(("device_map", "asked"), ATTACHED)
def test_torchscript_modules_are_refused_wherever_the_model_is_attached_to(
    device_map: dict[str, object], asked: dict[str, Any], weights: bool, tmp_path: Path
) -> None:
    model = scripted() if weights else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), torch.jit.script(nn.ReLU()))
    with pytest.raises(DispatchError, match=r"'[02]' is a TorchScript module"):
        dispatch_model(
            model, {**device_map, "2": 0} if len(device_map) > 1 else device_map, offload_dir=tmp_path, **asked
        )
    assert_untouched(model)


def test_a_scripted_module_in_an_attribute_is_named_where_the_host_computes_beside_an_accelerator() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].__dict__["gate"] = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(DispatchError, match="0 keeps a RecursiveScriptModule in its attribute 'gate'"):
        dispatch_model(model, {"": "cpu"}, main_device=0, offload="compute")


def test_a_model_that_is_torchscript_runs_whole_on_one_device_and_is_refused_elsewhere() -> None:
    whole = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.ones(1, 4)
    expected = whole(x)
    with pytest.raises(DispatchError, match="'the model' is a TorchScript module"):
        dispatch_model(whole, {"": "cpu"}, main_device="virtual:0")
    with pytest.raises(DispatchError, match="'the model' is a TorchScript module"):
        dispatch_model(whole, "auto", max_memory={0: "1MB", "cpu": "1GB"})
    assert torch.equal(dispatch_model(whole, {"": "cpu"})(x), expected)


class Choosing(nn.Module):
    """Runs modules that it looks up in a dict within a list.

    Args:
        registered: the modules are its children, too.
    """

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.kept = [{"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}]
        if registered:
            self.heads = nn.ModuleList(self.kept[0].values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.kept[0]["b"](self.kept[0]["a"](self.first(x)))
        return found


CHOOSING: list[Any] = [{"": "cpu"}, {"": "disk"}, {"first": 0, "heads.0": 1, "heads.1": 0}]


@pytest.mark.parametrize("device_map", CHOOSING)
def test_modules_in_a_dict_run_where_they_are_registered(device_map: dict[str, object], tmp_path: Path) -> None:
    model, x = Choosing(registered=True), torch.ones(2, 4)
    with torch.no_grad():
        expected = copy.deepcopy(model).to("virtual:0")(x.to("virtual:0")).cpu()
        dispatch_model(model, device_map, main_device=0, offload_dir=tmp_path)
        assert torch.equal(model(x.to("virtual:0")).cpu(), expected)
    undispatch(model)
    assert model.kept[0]["a"] is model.heads[0]
    assert_untouched(model)


def test_modules_in_a_dict_that_are_not_registered_are_named_before_anything_moves() -> None:
    model = Choosing(registered=False)
    for device_map in ({"": "cpu"}, {"": 0}):
        with pytest.raises(DispatchError, match="Choosing keeps a Linear in its attribute 'kept', a list"):
            dispatch_model(model, device_map, main_device=0)
    assert_untouched(model)
    assert_untouched(dispatch_model(model, {"": "cpu"}))


def test_modules_in_a_dict_that_are_moved_by_hand_are_accepted() -> None:
    model = Choosing(registered=False)
    for each in model.kept[0].values():
        each.to("virtual:0")
    dispatch_model(model, {"": "cpu"}, main_device=0)
    assert model(torch.ones(2, 4, device="virtual:0")).shape == (2, 4)


def test_a_reference_to_the_module_around_is_no_module_of_its_own() -> None:
    model, around = Choosing(registered=True), nn.ModuleDict()
    around.update({"inner": model, "other": nn.Linear(4, 4)})
    model.around = [around]  # type: ignore[assignment]
    dispatch_model(model, {"": "cpu"}, main_device=0)
    assert model(torch.ones(2, 4, device="virtual:0")).shape == (2, 4)


@pytest.mark.parametrize("device_map", [{"": 0}, {"": "disk"}, {"0": "cpu", "1": 1}])
def test_gradients_do_not_move_with_weights(device_map: dict[str, object], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(DispatchError, match=r"\.weight holds a gradient .* call model\.zero_grad\(\)"):
        dispatch_model(model, device_map, main_device=0, offload_dir=tmp_path)
    assert_untouched(model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    dispatch_model(model, device_map, main_device=0, offload_dir=tmp_path)


def test_gradients_of_a_dispatched_model_are_not_dropped_by_the_next_dispatch() -> None:
    model = dispatch_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": 0, "1": 1})
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(DispatchError, match=r"0\.weight holds a gradient \(in all 4 weights"):
        dispatch_model(model, {"0": 1, "1": 0})
    assert [str(parameter.grad.device) for parameter in model.parameters()][::2] == [  # type: ignore[union-attr]
        str(parameter.device) for parameter in model.parameters()
    ][::2]


def test_gradients_of_weights_that_stay_on_the_host_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    dispatch_model(model, {"": "cpu"}, main_device=0)
    assert all(now.grad is then for now, then in zip(model.parameters(), before, strict=True))
    undispatch(model)
