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
    "devices": (
        "format_size",
        "get_max_memory",
        "parse_size",
    ),
    "devices.empty": (
        "init_empty_weights",
        "init_on_device",
    ),
    "profile": (
        "TrainingMemory",
        "compute_module_sizes",
        "find_tied_parameters",
        "profile_model",
        "training_memory",
    ),
    "plan": (
        "Plan",
        "check_device_map",
        "get_balanced_memory",
        "infer_auto_device_map",
        "make_plan",
        "plan_training",
    ),
    "checkpoint": (
        "Checkpoint",
        "load_checkpoint_in_model",
        "save_model",
    ),
    "dispatch": (
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "from_pretrained",
        "get_plan",
        "load_checkpoint_and_dispatch",
        "quantization_errors",
        "send_to_device",
        "undispatch",
    ),
    "launch": (
        "debug_launcher",
        "notebook_launcher",
    ),
    "launch.basic": ("write_basic_config",),
    "train": (
        "AORecipeKwargs",
        "AcceleratedOptimizer",
        "AcceleratedScheduler",
        "Accelerator",
        "AcceleratorState",
        "AutocastKwargs",
        "BatchSamplerShard",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DataLoaderDispatcher",
        "DataLoaderShard",
        "DistributedDataParallelKwargs",
        "DistributedOperationException",
        "DistributedType",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "GradientState",
        "InitProcessGroupKwargs",
        "IterableDatasetShard",
        "KwargsHandler",
        "LoggerType",
        "PartialState",
        "PrecisionType",
        "ProfileKwargs",
        "ProjectConfiguration",
        "RNGType",
        "SeedableRandomSampler",
        "TorchDynamoPlugin",
        "broadcast",
        "broadcast_object_list",
        "concatenate",
        "convert_to_fp32",
        "find_batch_size",
        "gather",
        "gather_object",
        "pad_across_processes",
        "prepare_data_loader",
        "recursively_apply",
        "reduce",
        "set_seed",
        "skip_first_batches",
        "slice_tensors",
        "synchronize_rng_state",
        "synchronize_rng_states",
    ),
    "train.data": (
        "DataLoaderAdapter",
        "SkipBatchSampler",
        "SkipDataLoader",
        "get_sampler",
    ),
    "train.local_sgd": ("LocalSGD",),
    "train.logging": ("get_logger",),
    "train.memory": (
        "clear_device_cache",
        "find_executable_batch_size",
        "release_memory",
    ),
    "train.operations": ("listify",),
    "train.progress": ("tqdm",),
    "train.strategies.deepspeed_dummy": (
        "DummyOptim",
        "DummyScheduler",
    ),
    "train.strategies.deepspeed_plugin": ("DeepSpeedPlugin",),
    "train.strategies.fsdp_plugin": ("FullyShardedDataParallelPlugin",),
    "train.strategies.merge": ("merge_fsdp_weights",),
    "train.strategies.parallelism": (
        "ParallelismConfig",
        "TorchTensorParallelConfig",
        "TorchTensorParallelPlugin",
    ),
    "train.tracking": (
        "AimTracker",
        "ClearMLTracker",
        "CometMLTracker",
        "DVCLiveTracker",
        "GeneralTracker",
        "MLflowTracker",
        "SwanLabTracker",
        "TensorBoardTracker",
        "TrackioTracker",
        "WandBTracker",
        "filter_trackers",
        "on_main_process",
        "register_tracker_class",
    ),
    "train.types": ("DynamoBackend",),
    "utils.available": ("is_rich_available",),
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
        quantization_errors,
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
    from .launch.basic import write_basic_config
    from .plan import Plan, check_device_map, get_balanced_memory, infer_auto_device_map, make_plan, plan_training
    from .profile import (
        TrainingMemory,
        compute_module_sizes,
        find_tied_parameters,
        profile_model,
        training_memory,
    )
    from .train import (
        AcceleratedOptimizer,
        AcceleratedScheduler,
        Accelerator,
        AcceleratorState,
        AORecipeKwargs,
        AutocastKwargs,
        BatchSamplerShard,
        DataLoaderConfiguration,
        DataLoaderDispatcher,
        DataLoaderShard,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        DistributedOperationException,
        DistributedType,
        GradientAccumulationPlugin,
        GradientState,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        IterableDatasetShard,
        KwargsHandler,
        LoggerType,
        PartialState,
        PrecisionType,
        ProfileKwargs,
        ProjectConfiguration,
        RNGType,
        SeedableRandomSampler,
        TorchDynamoPlugin,
        broadcast,
        broadcast_object_list,
        concatenate,
        convert_to_fp32,
        find_batch_size,
        gather,
        gather_object,
        pad_across_processes,
        prepare_data_loader,
        recursively_apply,
        reduce,
        set_seed,
        skip_first_batches,
        slice_tensors,
        synchronize_rng_state,
        synchronize_rng_states,
    )
    from .train.data import DataLoaderAdapter, SkipBatchSampler, SkipDataLoader, get_sampler
    from .train.local_sgd import LocalSGD
    from .train.logging import get_logger
    from .train.memory import clear_device_cache, find_executable_batch_size, release_memory
    from .train.operations import listify
    from .train.progress import tqdm
    from .train.strategies.deepspeed_dummy import DummyOptim, DummyScheduler
    from .train.strategies.deepspeed_plugin import DeepSpeedPlugin
    from .train.strategies.fsdp_plugin import FullyShardedDataParallelPlugin
    from .train.strategies.merge import merge_fsdp_weights
    from .train.strategies.parallelism import ParallelismConfig, TorchTensorParallelConfig, TorchTensorParallelPlugin
    from .train.tracking import (
        AimTracker,
        ClearMLTracker,
        CometMLTracker,
        DVCLiveTracker,
        GeneralTracker,
        MLflowTracker,
        SwanLabTracker,
        TensorBoardTracker,
        TrackioTracker,
        WandBTracker,
        filter_trackers,
        on_main_process,
        register_tracker_class,
    )
    from .train.types import DynamoBackend
    from .utils.available import is_rich_available


def __getattr__(name: str) -> Any:
    room = _HOME.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{room}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
