"""Creates a DeepSpeed engine from a model and its optimizer, with a configuration completed from the run."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bigmodel.errors import TrainError
from bigmodel.train.environment import changed_environment
from bigmodel.train.strategies.base import StrategySettings
from bigmodel.train.strategies.deepspeed.config import DeepSpeedConfig, DummyOptim, DummyScheduler
from bigmodel.train.strategies.deepspeed.plugin import DeepSpeedPlugin


def import_deepspeed(device: torch.device) -> Any:
    """Import and return the `deepspeed` package for `device`, without its log output.

    Raises:
        TrainError: it is not installed.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise TrainError(
            f"DeepSpeed cannot be imported ({error}); install it with `pip install bigmodel[deepspeed]`"
        ) from error
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # DeepSpeed would compile this extension in the first run. Only inference uses it, and a run that is killed while
    # compiling leaves a lock file that blocks all later runs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def make_engine(
    settings: StrategySettings,
    plugin: DeepSpeedPlugin,
    model: nn.Module,
    optimizer: Any,
    scheduler: DummyScheduler | None,
    objects: Sequence[Any],
) -> Any:
    """Create the engine that trains `model` with `optimizer`.

    Args:
        optimizer: a torch optimizer, a `DummyOptim` (the configuration's own optimizer is used), or None.
        objects: everything given to `prepare`, for the data loaders' batch size.
    """
    deepspeed = import_deepspeed(settings.device)
    config = DeepSpeedConfig(copy.deepcopy(plugin.hf_ds_config.config))
    _fill_sizes(config, settings, plugin, objects)
    _fill_buckets(config, model)
    _fill_optimizer(config, optimizer, scheduler)
    left = config.autos()
    if left:
        raise TrainError(f"the DeepSpeed configuration leaves {', '.join(left)} at 'auto'; give a value")
    plugin.set_moe_leaf_modules(model)
    arguments: dict[str, Any] = {"model": model, "config_params": config.config, "dist_init_required": False}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif optimizer is not None:
        arguments["optimizer"] = _offloaded(optimizer, config)
    if scheduler is not None and scheduler.lr_scheduler_callable is not None:
        arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    # Read while the engine is made; a process that no launcher has started does not have it.
    with changed_environment({"LOCAL_RANK": os.environ.get("LOCAL_RANK", str(settings.local_process_index))}):
        return deepspeed.initialize(**arguments)[0]


@dataclass(frozen=True)
class DeepSpeedEngineWrapper:
    """Has an engine as an attribute: what programs written for accelerate read from the Accelerator."""

    engine: Any


def gradient_norm(engine: Any) -> Tensor | None:
    """Return the 2-norm of the gradients of the next step, over all ranks; None if the engine does not provide it."""
    zero = engine.optimizer
    scale = float(getattr(zero, "loss_scale", 1.0))
    if hasattr(zero, "scaled_global_norm"):
        norm = zero.scaled_global_norm()
    elif hasattr(zero, "_get_norm_groups"):
        norm = torch.linalg.vector_norm(torch.stack([torch.as_tensor(part) for part in zero._get_norm_groups()]))
    else:
        return None
    return torch.as_tensor(norm, dtype=torch.float32) / scale


def _fill_sizes(
    config: DeepSpeedConfig, settings: StrategySettings, plugin: DeepSpeedPlugin, objects: Sequence[Any]
) -> None:
    steps = config.get_value("gradient_accumulation_steps")
    if steps in (None, "auto"):
        steps = settings.gradient_accumulation_steps
        config.set_value("gradient_accumulation_steps", steps)
    elif steps != settings.gradient_accumulation_steps:
        raise TrainError(
            f"the DeepSpeed configuration accumulates {steps} steps, the Accelerator "
            f"{settings.gradient_accumulation_steps}; give both the same gradient_accumulation_steps"
        )
    micro = config.get_value("train_micro_batch_size_per_gpu")
    if micro in (None, "auto"):
        sizes = [size for size in map(_batch_size, objects) if size]
        micro = (min if plugin.is_train_batch_min else max)(sizes) if sizes else 1
        config.set_value("train_micro_batch_size_per_gpu", micro)
    if config.get_value("train_batch_size") in (None, "auto"):
        config.set_value("train_batch_size", micro * steps * settings.num_processes)
    if config.get_value("gradient_clipping") in (None, "auto"):
        # DeepSpeed's default is clipping to 1.0.
        config.set_value("gradient_clipping", 0.0)


def _batch_size(item: Any) -> int | None:
    if not isinstance(item, DataLoader):
        return None
    return item.batch_size or getattr(item.batch_sampler, "batch_size", None)


def _fill_buckets(config: DeepSpeedConfig, model: nn.Module) -> None:
    """Fill in sizes that depend on the model's width, as DeepSpeed recommends for stage 3."""
    text_config = getattr(model, "config", None)
    text_config = getattr(text_config, "text_config", None) or text_config
    sizes = getattr(text_config, "hidden_sizes", None) or [0]
    hidden = getattr(text_config, "hidden_size", None) or max(sizes)
    if hidden:
        config.fill("zero_optimization.reduce_bucket_size", hidden * hidden)
        config.fill("zero_optimization.stage3_prefetch_bucket_size", int(0.9 * hidden * hidden))
        config.fill("zero_optimization.stage3_param_persistence_threshold", 10 * hidden)


def _fill_optimizer(config: DeepSpeedConfig, optimizer: Any, scheduler: DummyScheduler | None) -> None:
    # DeepSpeed must accept any torch optimizer, unless the configuration forbids it.
    config.config.setdefault("zero_allow_untested_optimizer", True)
    config.config.setdefault("zero_force_ds_cpu_optimizer", False)
    if isinstance(optimizer, DummyOptim):
        if config.get_value("optimizer.type") is None:
            raise TrainError("DummyOptim stands for the optimizer of the DeepSpeed configuration, but it has none")
        values = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        for name, value in values.items():
            config.fill(f"optimizer.params.{name}", value)
        config.fill("scheduler.params.warmup_max_lr", optimizer.lr)
        config.fill("scheduler.params.warmup_min_lr", 0)
    elif optimizer is not None:
        config.config.pop("optimizer", None)
    if scheduler is None:
        config.config.pop("scheduler", None)
        return
    if config.get_value("scheduler.type") is None and scheduler.lr_scheduler_callable is None:
        raise TrainError("DummyScheduler stands for the scheduler of the DeepSpeed configuration, but it has none")
    config.fill("scheduler.params.total_num_steps", scheduler.total_num_steps)
    config.fill("scheduler.params.warmup_num_steps", scheduler.warmup_num_steps)


def _offloaded(optimizer: Any, config: DeepSpeedConfig) -> Any:
    """Return DeepSpeed's CPU Adam instead of torch's, if the configuration requires it."""
    forced = config.is_true("zero_force_ds_cpu_optimizer")
    if not forced or not config.is_offload() or not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    defaults = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    adamw = isinstance(optimizer, torch.optim.AdamW)
    return DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=adamw, **defaults)
