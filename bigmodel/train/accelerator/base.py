"""State shared by all parts of the Accelerator, and its public properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train.accelerator_state import AcceleratorState
from bigmodel.train.configuration import DataLoaderConfiguration, ProjectConfiguration
from bigmodel.train.data.loader import DataLoaderShard
from bigmodel.train.dispatched import DispatchedModels
from bigmodel.train.handlers import AutocastKwargs, ProfileKwargs
from bigmodel.train.optimizer import AcceleratedOptimizer
from bigmodel.train.precision.scaling import LossScaler
from bigmodel.train.scheduler import AcceleratedScheduler
from bigmodel.train.state.gradient import GradientState
from bigmodel.train.state.ranks import RankOperations
from bigmodel.train.strategies.base import Strategy
from bigmodel.train.types import DistributedType


class AcceleratorCore(RankOperations):
    """Attributes that the constructor sets and the parts of the Accelerator share."""

    state: AcceleratorState
    gradient_state: GradientState
    strategy: Strategy
    device_placement: bool
    step_scheduler_with_optimizer: bool
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    autocast_handler: AutocastKwargs | None
    profile_handler: ProfileKwargs | None
    handlers: dict[type, Any]
    rng_types: list[Any]
    step: int

    _scaler: LossScaler | None
    _dispatched: DispatchedModels
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[DataLoaderShard]
    _custom_objects: list[Any]

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """Number of processes."""
        return int(self.state.num_processes)

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """Rank of this process."""
        return int(self.state.process_index)

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """Rank of this process on its machine."""
        return int(self.state.local_process_index)

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0 of the run."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its machine."""
        return self.state.is_local_main_process

    @property
    def mixed_precision(self) -> str:
        """The precision in force: "no", "fp16", "bf16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def scaler(self) -> Any:
        """The `torch.amp.GradScaler` of an fp16 run, else None."""
        return self._scaler.torch_scaler if self._scaler is not None else None

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        self.state.wait_for_everyone()

    @property
    def _writes_files(self) -> bool:
        """Whether this process writes the files that one process writes for all."""
        each = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each else self.is_main_process

    def _folder(self, path: Any) -> Path:
        return Path(path).expanduser()

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed training."""
        return self.state.distributed_type

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether more than one accelerator is in use."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin, or None."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The engine of the first prepared model as its attribute ``engine``; None without DeepSpeed, or before it."""
        if self.distributed_type != DistributedType.DEEPSPEED or self.strategy.engine is None:
            return None
        from bigmodel.train.strategies.deepspeed.engine import DeepSpeedEngineWrapper

        return DeepSpeedEngineWrapper(self.strategy.engine)

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded with `fully_shard`."""
        return self.state.is_fsdp2

    @property
    def split_batches(self) -> bool:
        """Whether batches are split among processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads the data for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last batches are filled with repeated samples."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether epochs are shuffled with seed + epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders resume in mid-epoch after `load_state`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    @property
    def sync_gradients(self) -> bool:
        """Whether the current pass ends an accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value
        self.strategy.set_sync_gradients(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Backward passes per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if steps < 1:
            raise TrainError(f"gradient accumulation over {steps} steps; give 1 or more")
        self.gradient_state.plugin.num_steps = steps

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because gradients overflowed in fp16."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def fp8_backend(self) -> str | None:
        """The fp8 implementation: "AO" (torchao), or None without fp8."""
        return "AO" if self.mixed_precision == "fp8" else None

    @property
    def should_save_model(self) -> bool:
        """Whether this process has a full copy of the model to save."""
        return self.strategy.should_save_model

    @property
    def parallelism_config(self) -> Any:
        """The `ParallelismConfig`, or None."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh, or None."""
        return self.state.device_mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether there is a device mesh."""
        return self.torch_device_mesh is not None

    def _mesh_rank(self, *names: str) -> int:
        mesh = self.torch_device_mesh
        present = [name for name in names if name in (getattr(mesh, "mesh_dim_names", None) or ())]
        return int(mesh.get_local_rank(present[0])) if present else 0

    @property
    def tensor_parallel_rank(self) -> int:
        """Rank of this process in its tensor-parallel group."""
        return self._mesh_rank("tp")

    @property
    def data_parallel_rank(self) -> int:
        """Rank of this process among those that read different data."""
        return self.strategy.data_parallel()[1]

    @property
    def data_parallel_shard_rank(self) -> int:
        """Rank of this process among those that share one copy of the parameters."""
        return self._mesh_rank("dp_shard")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Not supported."""
        raise TrainError("pipeline parallelism is not supported; use tensor parallelism or FSDP2")

    @property
    def context_parallel_rank(self) -> int:
        """Not supported."""
        raise TrainError("context parallelism is not supported; use tensor parallelism or FSDP2")
