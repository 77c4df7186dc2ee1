"""What every part of the Accelerator knows: its state, its strategy, and what it has prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigmodel.train.configuration import DataLoaderConfiguration, ProjectConfiguration
from bigmodel.train.data.loader import DataLoaderShard
from bigmodel.train.dispatched import DispatchedModels
from bigmodel.train.handlers import AutocastKwargs, ProfileKwargs
from bigmodel.train.optimizer import AcceleratedOptimizer
from bigmodel.train.scaling import LossScaler
from bigmodel.train.scheduler import AcceleratedScheduler
from bigmodel.train.state.accelerator_state import AcceleratorState
from bigmodel.train.state.gradient import GradientState
from bigmodel.train.state.ranks import RankOperations
from bigmodel.train.strategies.base import Strategy


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
        """How many processes train."""
        return int(self.state.num_processes)

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """The number of this process."""
        return int(self.state.process_index)

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """The number of this process on its machine."""
        return int(self.state.local_process_index)

    @property
    def mixed_precision(self) -> str:
        """The precision in force: "no", "fp16", "bf16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def scaler(self) -> Any:
        """The `torch.amp.GradScaler` of an fp16 run, else None."""
        return self._scaler.torch_scaler if self._scaler is not None else None

    def wait_for_everyone(self) -> None:
        """Return when every process has called it."""
        self.state.wait_for_everyone()

    @property
    def _writes_files(self) -> bool:
        """Whether this process writes what one process writes for all."""
        each = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each else self.is_main_process

    def _folder(self, path: Any) -> Path:
        return Path(path).expanduser()
