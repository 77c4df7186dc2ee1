"""fp8 needs hardware and a package, and says which of them is missing."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator, AORecipeKwargs, fp8

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
