"""Dataclasses that carry arguments to PyTorch's objects."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs, ProfileKwargs


def test_only_what_was_changed_is_passed_on() -> None:
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(growth_interval=7).to_kwargs() == {"growth_interval": 7}
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="fp16")
    assert handler.to_kwargs() == {"find_unused_parameters": True}
    assert handler.to_dict().keys() == {field.name for field in fields(handler) if not field.name.startswith("comm_")}
    assert handler.to_dict(ignore_keys=["dim"])["comm_hook"] == "fp16"


def test_a_hook_cannot_wrap_another() -> None:
    with pytest.raises(TrainError, match="comm_wrapper is power_sgd"):
        DistributedDataParallelKwargs(comm_wrapper="power_sgd")


def test_a_profile_is_left_in_the_folder_asked_for(tmp_path: Path) -> None:
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))
    with Accelerator(kwargs_handlers=[handler]).profile() as profiler:
        torch.ones(2).sum()
    assert any("sum" in event.key for event in profiler.key_averages())
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["profile_0.json"]


def test_an_unknown_activity_is_refused() -> None:
    with pytest.raises(TrainError, match="abacus"), Accelerator().profile(ProfileKwargs(activities=["abacus"])):
        pass
