"""Mixed precision: choices, autocast, float32 outputs, and the requirements of fp8."""

from __future__ import annotations

import copy
import importlib.machinery
import inspect
import pickle
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.devices import virtual
from bigmodel.devices.virtual.backend import BackendModule
from bigmodel.errors import TrainError
from bigmodel.train import Accelerator, AORecipeKwargs, AutocastKwargs
from bigmodel.train.precision import mixed as fp8
from bigmodel.train.precision.mixed import MixedPrecisionForward, autocast_context, check_precision

CPU = torch.device("cpu")


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner: torch.dtype | None = None

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> dict[str, torch.Tensor]:
        out = self.linear(x)
        self.inner = out.dtype
        return {"out": out}


@pytest.mark.parametrize("name", ["no", "fp16", "bf16"])
def test_known_precisions_are_accepted(name: str) -> None:
    assert check_precision(name, CPU) == name


def test_unknown_precisions_are_refused_with_the_known_ones() -> None:
    with pytest.raises(TrainError, match=r"'int8'; choose among \['no', 'fp16', 'bf16', 'fp8'\]"):
        check_precision("int8", CPU)


def test_fp8_says_what_is_missing_here() -> None:
    with pytest.raises(TrainError, match=r"fp8 needs an NVIDIA GPU \(this process trains on cpu\)"):
        check_precision("fp8", CPU)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("no", torch.float32)])
def test_autocast_computes_in_the_precision(name: str, dtype: torch.dtype) -> None:
    with autocast_context(name, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_autocast_can_be_switched_off_inside_another() -> None:
    with autocast_context("bf16", CPU), autocast_context("bf16", CPU, AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_a_forward_computes_in_the_precision_and_answers_in_float32() -> None:
    model = Recorder()
    MixedPrecisionForward.install(model, "bf16", CPU)
    MixedPrecisionForward.install(model, "bf16", CPU)
    assert model(torch.ones(1, 2))["out"].dtype == torch.float32
    assert model.inner == torch.bfloat16
    assert list(inspect.signature(model.forward).parameters) == ["x", "twice"]
    MixedPrecisionForward.remove(model)
    model(torch.ones(1, 2))
    assert model.inner == torch.float32
    assert "forward" not in model.__dict__


def test_another_s_forward_on_the_instance_is_given_back() -> None:
    model = nn.Linear(2, 2)
    own = lambda x: x  # noqa: E731
    model.forward = own
    MixedPrecisionForward.install(model, "bf16", CPU)
    MixedPrecisionForward.remove(model)
    assert model.forward is own
    MixedPrecisionForward.remove(model)


def test_a_copy_runs_with_its_own_weights() -> None:
    model = Recorder()
    MixedPrecisionForward.install(model, "bf16", CPU)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.linear.weight.zero_()
            twin.linear.bias.zero_()
        assert twin(torch.ones(1, 2))["out"].abs().sum() == 0
        assert twin.inner == torch.bfloat16


def test_a_device_without_autocast_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual.enable(count=1)
    monkeypatch.delattr(BackendModule, "get_amp_supported_dtype")
    with pytest.raises(TrainError, match=r"no autocast for virtual devices.*mixed_precision='no'"):
        check_precision("bf16", torch.device("virtual:0"))
    virtual.disable()


def test_no_precision_leaves_an_autocast_around_it_as_it_is() -> None:
    with torch.autocast("cpu", torch.bfloat16), autocast_context("no", CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


CUDA = torch.device("cuda:0")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that computes in fp8, and a torchao that notes what it is asked to convert."""
    asked: dict[str, Any] = {}
    package, float8 = types.ModuleType("torchao"), types.ModuleType("torchao.float8")
    package.__spec__ = importlib.machinery.ModuleSpec("torchao", None)
    float8.convert_to_float8_training = lambda model, **options: asked.update(model=model, **options)
    float8.Float8LinearConfig = lambda **fields: fields
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return asked


def test_without_hardware_the_accelerator_says_what_is_missing() -> None:
    with pytest.raises(TrainError, match=r"fp8 needs an NVIDIA GPU \(this process trains on cpu\).*'bf16' instead"):
        Accelerator(mixed_precision="fp8")


def test_an_older_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(TrainError, match=r"compute capability 8\.9 or above \(A100 has 8\.0\)"):
        fp8.check_fp8(CUDA)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(fp8, "find_spec", lambda name: None)
    with pytest.raises(TrainError, match=r"fp8 needs the torchao package \(pip install torchao\)"):
        fp8.check_fp8(CUDA)


def test_inner_layers_of_fitting_sizes_are_converted(torchao: dict[str, Any]) -> None:
    sizes = [(16, 16), (16, 32), (32, 40), (40, 32), (32, 32), (32, 16)]
    model = nn.Sequential(*(nn.Linear(*size) for size in sizes), nn.ReLU())
    assert fp8.convert_to_fp8(model, CUDA) is model
    fits = [name for name, module in model.named_children() if torchao["module_filter_fn"](module, name)]
    assert fits == ["1", "4"]  # neither the first nor the last, nor sizes that 16 does not divide


def test_a_recipe_is_passed_on(torchao: dict[str, Any]) -> None:
    recipe = AORecipeKwargs(config="recipe", module_filter_func=lambda module, name: True)
    fp8.convert_to_fp8(nn.Linear(16, 16), CUDA, recipe)
    assert (torchao["config"], torchao["module_filter_fn"]) == ("recipe", recipe.module_filter_func)


def test_fields_of_torchaos_configuration_may_be_given_alone(torchao: dict[str, Any]) -> None:
    fp8.convert_to_fp8(nn.Linear(16, 16), CUDA, AORecipeKwargs(pad_inner_dim=True))
    assert torchao["config"] == {"pad_inner_dim": True}
    with pytest.raises(TrainError, match="AORecipeKwargs has a config; set pad_inner_dim in it"):
        AORecipeKwargs(config="recipe", pad_inner_dim=True)
