"""Dataclasses passed to the Accelerator in `kwargs_handlers`: arguments of the PyTorch objects that it creates."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from bigmodel.errors import TrainError
from bigmodel.train.types import DDPCommunicationHookType


@dataclass
class KwargsHandler:
    """Base class of the handlers: a dataclass that knows which of its fields differ from their defaults."""

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        changed = {}
        for item in fields(self):
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            value = getattr(self, item.name)
            if value != default:
                changed[item.name] = value
        return changed


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`. `cache_enabled=None` means PyTorch's own default."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`, used with fp16."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    `backend=None` chooses by device: gloo for the CPU, NCCL for CUDA. `timeout=None` is PyTorch's own.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


COMM_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")
"""Fields of `DistributedDataParallelKwargs` that are no arguments of PyTorch's class."""


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and a gradient communication hook.

    `comm_hook` compresses gradients for the all-reduce; `comm_wrapper` wraps it with a cast to fp16 or bf16;
    `comm_state_option` holds arguments of `PowerSGDState`.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)
        if self.comm_wrapper not in ("no", "fp16", "bf16"):
            raise TrainError(f"comm_wrapper is {self.comm_wrapper}; only 'no', 'fp16' and 'bf16' wrap a hook")

    def to_dict(self, ignore_keys: Collection[str] = COMM_FIELDS) -> dict[str, Any]:
        """Return the fields by name, but for `ignore_keys`: those that `DistributedDataParallel` itself takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the changed arguments that `DistributedDataParallel` itself takes."""
        return {name: value for name, value in super().to_kwargs().items() if name not in COMM_FIELDS}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the communication hook with its wrapper, if there is one.

        Raises:
            TrainError: the process group does not support the hook's dtype (bf16 over gloo).
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        kind = DDPCommunicationHookType
        hooks: dict[DDPCommunicationHookType, Any] = {
            kind.FP16: default_hooks.fp16_compress_hook,
            kind.BF16: default_hooks.bf16_compress_hook,
            kind.POWER_SGD: powerSGD_hook.powerSGD_hook,
            kind.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[DDPCommunicationHookType, Any] = {
            kind.FP16: default_hooks.fp16_compress_wrapper,
            kind.BF16: default_hooks.bf16_compress_wrapper,
        }
        hook, wrap, state = hooks.get(self.comm_hook), wrappers.get(self.comm_wrapper), None
        if hook is None:
            return
        if self.comm_hook in (kind.POWER_SGD, kind.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        try:
            model.register_comm_hook(state, wrap(hook) if wrap is not None else hook)
        except TypeError as error:
            raise TrainError(f"comm_hook {self.comm_hook} in {self.comm_wrapper} cannot be used: {error}") from error


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Conversion of linear layers to fp8 by torchao.

    `config` is its `Float8LinearConfig`, `module_filter_func` a filter (module, name) -> bool. Without a config,
    `pad_inner_dim` and `enable_fsdp_float8_all_gather` are that class's fields of these names; None is its default.
    """

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        if self.config is not None and self.fields_of_config():
            raise TrainError(f"AORecipeKwargs has a config; set {', '.join(self.fields_of_config())} in it")

    def fields_of_config(self) -> dict[str, bool]:
        """Return the fields of a `Float8LinearConfig` that are set here."""
        chosen = {
            "pad_inner_dim": self.pad_inner_dim,
            "enable_fsdp_float8_all_gather": self.enable_fsdp_float8_all_gather,
        }
        return {name: value for name, value in chosen.items() if value is not None}


_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`.

    `activities` are names ("cpu", "cuda", "xpu"); `schedule_option` holds arguments of `torch.profiler.schedule`;
    `output_trace_dir` receives one Chrome trace for each process.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | Path | None = None

    def build(self) -> profile:
        """Return the profiler. Raises TrainError on an unknown activity."""
        activities = None
        if self.activities is not None:
            unknown = sorted(set(self.activities) - set(_ACTIVITIES))
            if unknown:
                raise TrainError(f"unknown profiler activity {unknown[0]!r}; choose among {sorted(_ACTIVITIES)}")
            activities = [_ACTIVITIES[name] for name in self.activities]
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule(**self.schedule_option) if self.schedule_option is not None else None,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )
