"""The Accelerator: adapts one training loop to processes, devices and precisions.

This module checks the constructor's arguments and builds the state and the strategy from them.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.accelerator.checkpoints import Checkpoints, Saving
from bigmodel.train.accelerator.gathering import Exchange
from bigmodel.train.accelerator.preparing import Preparing
from bigmodel.train.accelerator.stepping import Stepping
from bigmodel.train.accelerator.tracking import Tracking
from bigmodel.train.accelerator_state import AcceleratorState, Plugins
from bigmodel.train.configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from bigmodel.train.dispatched import DispatchedModels
from bigmodel.train.handlers import (
    AutocastKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from bigmodel.train.precision.scaling import LossScaler
from bigmodel.train.state.gradient import GradientState
from bigmodel.train.strategies.base import StrategySettings, make_strategy
from bigmodel.train.types import RNGType


class Accelerator(Preparing, Stepping, Exchange, Saving, Checkpoints, Tracking):
    """Runs one training loop on a CPU, a GPU, or many processes, in a given precision.

    Args:
        device_placement: move models and batches to this process's device.
        split_batches: as in `DataLoaderConfiguration`, where it should be set.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; by default the launcher's setting, else "no".
        gradient_accumulation_steps: backward passes per optimizer step.
        cpu: train on the CPU even if there is an accelerator.
        dataloader_config: how data loaders share the data among processes.
        deepspeed_plugin: train with DeepSpeed.
        deepspeed_plugins: train several models with DeepSpeed: plugins by name.
        fsdp_plugin: train with FSDP2.
        torch_tp_plugin: train with tensor parallelism.
        megatron_lm_plugin: not supported.
        rng_types: generators to synchronise at the start of each epoch ("torch", "cuda", "generator").
        log_with: trackers, by name or as objects, or "all".
        project_dir: the project's folder.
        project_config: the project's folders and the naming of checkpoints.
        gradient_accumulation_plugin: settings of gradient accumulation, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: whether the loop steps schedulers together with their optimizers.
        kwargs_handlers: arguments of PyTorch objects that are created here (see `bigmodel.train.handlers`).
        dynamo_backend: compile models with `torch.compile` and this backend.
        dynamo_plugin: settings of `torch.compile`.
        parallelism_config: sizes of the device mesh.

    Raises:
        TrainError: arguments contradict each other, or this machine does not support them.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        self.handlers = _by_class(kwargs_handlers)
        self.autocast_handler = self.handlers.get(AutocastKwargs)
        self.profile_handler = self.handlers.get(ProfileKwargs)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dataloader_config = _loader_configuration(dataloader_config, split_batches)
        self.project_configuration = _project_configuration(project_config, project_dir)
        self.rng_types = list(_rng_types(rng_types))
        deepspeed = _deepspeed_plugins(deepspeed_plugin, deepspeed_plugins)
        plugins = Plugins(deepspeed, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin, parallelism_config)
        group = self.handlers.get(InitProcessGroupKwargs, InitProcessGroupKwargs()).to_kwargs()
        self.state = AcceleratorState(
            mixed_precision, cpu, _dynamo_plugin(dynamo_backend, dynamo_plugin), plugins, **group
        )
        self.gradient_state = GradientState(
            _accumulation_plugin(gradient_accumulation_steps, gradient_accumulation_plugin)
        )
        self._make_strategy()
        self._reset()
        self._choose_trackers(log_with)

    def _make_strategy(self) -> None:
        settings = StrategySettings(
            device=self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            local_process_index=self.local_process_index,
            mixed_precision=self.mixed_precision,
            gradient_accumulation_steps=self.gradient_state.num_steps,
            plugin=self.state.plugin,
            parallelism_config=self.state.parallelism_config,
            device_mesh=self.state.device_mesh,
            handlers=self.handlers,
        )
        self.strategy = make_strategy(self.state.distributed_type, settings)
        self._scaler = None
        if self.mixed_precision == "fp16" and self.strategy.uses_grad_scaler:
            kwargs = self.handlers.get(GradScalerKwargs, GradScalerKwargs()).to_kwargs()
            self._scaler = LossScaler(self.strategy.make_grad_scaler(**kwargs))

    def _reset(self) -> None:
        self.step = 0
        self._trigger = False
        self._dispatched = DispatchedModels()
        self._models, self._optimizers, self._schedulers = [], [], []
        self._dataloaders, self._custom_objects = [], []
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()

    def __repr__(self) -> str:
        return f"Accelerator({self.state!r})"


def _by_class(handlers: Sequence[KwargsHandler] | None) -> dict[type, Any]:
    """Return the handlers by class. Raises TrainError for other objects, or two handlers of one class."""
    result: dict[type, Any] = {}
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise TrainError(f"kwargs_handlers holds {handler!r}, which is not one of the ...Kwargs dataclasses")
        if type(handler) in result:
            raise TrainError(f"kwargs_handlers holds two {type(handler).__name__}; give one")
        result[type(handler)] = handler
    return result


def _accumulation_plugin(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Return the settings of gradient accumulation. Raises TrainError if both arguments are given."""
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=environment.integer(environment.GRADIENT_ACCUMULATION_STEPS, steps))
    if steps != 1:
        raise TrainError("give either gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    plugin.num_steps = plugin.num_steps or 1
    return plugin


def _loader_configuration(
    configuration: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    """Return the configuration of data loaders; `split_batches` is a deprecated argument of the Accelerator."""
    configuration = configuration or DataLoaderConfiguration()
    if split_batches is not None:
        configuration.split_batches = split_batches
    if configuration.data_seed is not None and not configuration.use_seedable_sampler:
        raise TrainError("data_seed needs the seedable sampler; set use_seedable_sampler=True too")
    return configuration


def _project_configuration(configuration: ProjectConfiguration | None, project_dir: Any) -> ProjectConfiguration:
    """Return the configuration of the project's folders."""
    configuration = configuration or ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and configuration.project_dir is None:
        configuration.set_directories(project_dir)
    return configuration


def _dynamo_plugin(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return the settings of `torch.compile`. Raises TrainError if both arguments are given."""
    if plugin is not None and backend is not None:
        raise TrainError("give either dynamo_backend or dynamo_plugin, not both")
    return plugin or TorchDynamoPlugin(backend=None if backend is None else str(backend))


def _rng_types(names: Sequence[Any] | None) -> list[RNGType]:
    """Return the generators to synchronise; by default those of the loaders. Raises TrainError for unknown names."""
    if names is None:
        return [RNGType.GENERATOR]
    unknown = [name for name in names if str(name) not in RNGType.list()]
    if unknown:
        raise TrainError(f"unknown generator type {unknown[0]!r} in rng_types; choose among {RNGType.list()}")
    return [RNGType(str(name)) for name in names]


def _deepspeed_plugins(plugin: Any, plugins: Any) -> Any:
    """Return the DeepSpeed plugin or plugins. Raises TrainError if both arguments are given."""
    if plugin is not None and plugins is not None:
        raise TrainError("give either deepspeed_plugin or deepspeed_plugins, not both")
    return plugin if plugins is None else plugins
