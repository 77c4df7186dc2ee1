"""Attributes shared by every part of the Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator, DataLoaderConfiguration, DistributedType, ProjectConfiguration
from tests.train.multiprocess import on_ranks


def test_who_and_where_this_process_is() -> None:
    accelerator = Accelerator()
    assert accelerator.device == torch.device("cpu")
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.mixed_precision == "no"
    accelerator.wait_for_everyone()


def test_without_fp16_there_is_no_scaler() -> None:
    assert Accelerator(mixed_precision="bf16").scaler is None


@pytest.mark.parametrize("each_node", [False, True])
def test_one_process_writes_for_all_or_for_those_of_its_machine(
    each_node: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ProjectConfiguration(project_dir=str(tmp_path), save_on_each_node=each_node)
    accelerator = Accelerator(project_config=settings)
    monkeypatch.setattr(accelerator.state._partial, "process_index", 1)  # the first process of the second machine
    assert accelerator._writes_files is each_node
    assert accelerator.is_local_main_process
    assert not accelerator.is_main_process


def test_the_configuration_is_echoed() -> None:
    config = DataLoaderConfiguration(
        split_batches=True, dispatch_batches=False, use_seedable_sampler=True, non_blocking=True
    )
    accelerator = Accelerator(dataloader_config=config)
    assert accelerator.split_batches
    assert accelerator.dispatch_batches is False
    assert accelerator.use_seedable_sampler
    assert accelerator.non_blocking
    assert not accelerator.use_stateful_dataloader
    accelerator.even_batches = False
    assert not config.even_batches
    assert Accelerator(split_batches=True).split_batches


def test_one_process_on_the_cpu() -> None:
    accelerator = Accelerator()
    assert accelerator.device == torch.device("cpu")
    assert accelerator.distributed_type == DistributedType.NO
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_last_process
    assert accelerator.should_save_model
    assert accelerator.sync_gradients
    absent = [
        accelerator.use_distributed,
        accelerator.multi_device,
        accelerator.is_fsdp2,
        accelerator.deepspeed_plugin,
        accelerator.fp8_backend,
        accelerator.parallelism_config,
        accelerator.torch_device_mesh,
        accelerator.is_composable_parallelism_enabled,
        accelerator.optimizer_step_was_skipped,
    ]
    assert not any(absent)
    assert accelerator.tensor_parallel_rank == accelerator.data_parallel_shard_rank == 0
    assert accelerator.save_iteration == 0


@pytest.mark.parametrize("name", ["pipeline_parallel_rank", "context_parallel_rank"])
def test_ranks_of_what_is_not_supported_name_the_alternative(name: str) -> None:
    accelerator: Any = Accelerator()
    with pytest.raises(TrainError, match="use tensor parallelism or FSDP2"):
        getattr(accelerator, name)


@pytest.mark.slow
@on_ranks
def test_two_processes() -> None:
    accelerator = Accelerator()
    assert accelerator.use_distributed
    assert not accelerator.multi_device
    assert accelerator.data_parallel_rank == accelerator.process_index
    assert accelerator.should_save_model == accelerator.is_main_process
