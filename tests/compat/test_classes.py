"""Small classes and functions that other libraries import from ``accelerate.utils``."""

from __future__ import annotations

import logging
import platform
import socket
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bigmodel.compat import classes
from bigmodel.errors import TrainError
from bigmodel.train import AORecipeKwargs
from bigmodel.train.state.partial import PartialState
from bigmodel.train.types import DistributedType
from tests.train.multiprocess import on_ranks
from tests.train.new_states import new_states as new_states


def test_a_class_is_found_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    assert classes.get_module_class_from_name(model, "ReLU") is nn.ReLU
    assert classes.get_module_class_from_name(model, "Sequential") is nn.Sequential
    assert classes.get_module_class_from_name(model, "Tanh") is None


def test_a_recipe_of_8_bits_is_that_of_torchao() -> None:
    assert isinstance(classes.FP8RecipeKwargs(backend="ao"), AORecipeKwargs)
    for backend in ("TE", "MSAMP"):
        with pytest.raises(TrainError, match=f"backend '{backend}' .* not supported"):
            classes.FP8RecipeKwargs(backend=backend)


def test_only_a_run_of_deepspeed_has_its_plugin() -> None:
    plugin = object()
    assert (
        classes.get_active_deepspeed_plugin(
            SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=plugin)
        )
        is plugin
    )
    with pytest.raises(ValueError, match="does not use DeepSpeed"):
        classes.get_active_deepspeed_plugin(SimpleNamespace(distributed_type=DistributedType.NO))


@pytest.mark.parametrize(("capability", "can"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_since_ada_compute_with_8_bits(
    capability: tuple[int, int], can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not classes.check_cuda_fp8_capability()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert classes.check_cuda_fp8_capability() is can


def test_variables_that_a_shell_would_misread_are_left_out() -> None:
    given = {"A": "1", "B": "x y", "C;": "2", "D": "", "F": "a\nb", "G": "q=r", "H": "x|y"}
    assert classes.convert_dict_to_env_variables(given) == ["A=1\n", "G=q=r\n"]


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("localhost", classes.get_free_port()))


def test_old_kernels_are_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    for release, warns in (("5.4.0-1-generic", True), ("5.5.0", False), ("5.10.1", False), ("6.1", False)):
        caplog.clear()
        monkeypatch.setattr(platform, "release", lambda release=release: release)
        with caplog.at_level(logging.WARNING):
            classes.check_os_kernel()
        assert (release in caplog.text) is warns


def test_the_ranks_of_a_split_model_are_known() -> None:
    model = nn.Linear(1, 1)
    assert classes.get_model_tp_size(model) is None
    model.tp_size = 2  # type: ignore[assignment]
    assert classes.get_model_tp_size(model) == 2


@pytest.mark.slow
@on_ranks
def test_a_tensor_of_one_rank_is_copied_to_all() -> None:
    last = PartialState().is_last_process
    given = torch.arange(6, dtype=torch.int64).view(2, 3)
    found = classes.copy_tensor_to_devices(given if last else None)
    assert found.dtype == torch.int64
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]
