"""prepare: models, wrapped for the run and unwrapped again."""

from __future__ import annotations

import pytest
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator
from tests.train.multiprocess import on_ranks


def test_unwrapping_gives_the_model_back_with_or_without_its_wrappers() -> None:
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="eager")
    bare = nn.Linear(2, 2)
    model = accelerator.prepare(bare)
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is bare
    assert "forward" in bare.__dict__
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in bare.__dict__


def test_a_dispatched_model_is_found() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"a": 0, "b": "cpu"}
    assert accelerator.verify_device_map(model)


@on_ranks
def test_two_processes_wrap_models_that_train() -> None:
    accelerator = Accelerator()
    bare = nn.Linear(2, 2)
    model = accelerator.prepare(bare)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert accelerator.unwrap_model(model) is bare
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert accelerator.prepare(frozen) is frozen
    other = nn.Linear(2, 2)
    assert accelerator.prepare_model(other, evaluation_mode=True) is other


@on_ranks
def test_a_dispatched_model_cannot_be_shared_by_processes() -> None:
    model = nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(TrainError, match="dispatched over several devices"):
        Accelerator().prepare(model)
