"""bigmodel: run, serve and train models that do not fit their GPU.

    from bigmodel import from_pretrained

    model = from_pretrained("path/or/hub-id", max_memory={0: "10GiB", "cpu": "16GiB"})
    print(model.hf_device_map)

Names are imported when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (
        "BigModelError",
        "BudgetError",
        "CheckpointError",
        "CheckpointFormatError",
        "CheckpointMismatchError",
        "CheckpointNotFoundError",
        "DeviceError",
        "DeviceMapError",
        "DispatchError",
        "LaunchError",
        "PlanError",
        "ServeError",
        "SizeError",
        "TrainError",
    ),
    "devices": ("format_size", "get_max_memory", "parse_size"),
    "devices.empty": ("init_empty_weights", "init_on_device"),
    "profile": ("compute_module_sizes", "find_tied_parameters", "profile_model"),
    "plan": ("Plan", "check_device_map", "get_balanced_memory", "infer_auto_device_map", "make_plan"),
    "checkpoint": ("Checkpoint", "load_checkpoint_in_model", "save_model"),
    "dispatch": (
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "from_pretrained",
        "get_plan",
        "load_checkpoint_and_dispatch",
        "send_to_device",
        "undispatch",
    ),
    "launch": (
        "debug_launcher",
        "notebook_launcher",
    ),
    "train": (
        "AcceleratedOptimizer",
        "AcceleratedScheduler",
        "Accelerator",
        "AcceleratorState",
        "AutocastKwargs",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "GradientState",
        "InitProcessGroupKwargs",
        "PartialState",
        "ProfileKwargs",
        "ProjectConfiguration",
        "broadcast",
        "gather",
        "gather_object",
        "pad_across_processes",
        "prepare_data_loader",
        "reduce",
        "set_seed",
        "skip_first_batches",
        "synchronize_rng_states",
    ),
    "train.local_sgd": ("LocalSGD",),
    "train.logging": ("get_logger",),
    "train.memory": (
        "clear_device_cache",
        "find_executable_batch_size",
        "release_memory",
    ),
    "train.progress": ("tqdm",),
    "train.strategies.deepspeed_plugin": ("DeepSpeedPlugin",),
    "train.strategies.fsdp_plugin": ("FullyShardedDataParallelPlugin",),
    "train.strategies.parallelism": ("ParallelismConfig", "TorchTensorParallelPlugin"),
    "train.tracking": ("GeneralTracker",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, load_checkpoint_in_model, save_model
    from .devices import format_size, get_max_memory, parse_size
    from .devices.empty import init_empty_weights, init_on_device
    from .dispatch import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        from_pretrained,
        get_plan,
        load_checkpoint_and_dispatch,
        send_to_device,
        undispatch,
    )
    from .errors import (
        BigModelError,
        BudgetError,
        CheckpointError,
        CheckpointFormatError,
        CheckpointMismatchError,
        CheckpointNotFoundError,
        DeviceError,
        DeviceMapError,
        DispatchError,
        LaunchError,
        PlanError,
        ServeError,
        SizeError,
        TrainError,
    )
    from .launch import debug_launcher, notebook_launcher
    from .plan import Plan, check_device_map, get_balanced_memory, infer_auto_device_map, make_plan
    from .profile import compute_module_sizes, find_tied_parameters, profile_model
    from .train import (
        AcceleratedOptimizer,
        AcceleratedScheduler,
        Accelerator,
        AcceleratorState,
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        DistributedType,
        GradientAccumulationPlugin,
        GradientState,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        PartialState,
        ProfileKwargs,
        ProjectConfiguration,
        broadcast,
        gather,
        gather_object,
        pad_across_processes,
        prepare_data_loader,
        reduce,
        set_seed,
        skip_first_batches,
        synchronize_rng_states,
    )
    from .train.local_sgd import LocalSGD
    from .train.logging import get_logger
    from .train.memory import clear_device_cache, find_executable_batch_size, release_memory
    from .train.progress import tqdm
    from .train.strategies.deepspeed_plugin import DeepSpeedPlugin
    from .train.strategies.fsdp_plugin import FullyShardedDataParallelPlugin
    from .train.strategies.parallelism import ParallelismConfig, TorchTensorParallelPlugin
    from .train.tracking import GeneralTracker


def __getattr__(name: str) -> Any:
    room = _HOME.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{room}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
