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
    "train": ("Accelerator",),
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
    from .plan import Plan, check_device_map, get_balanced_memory, infer_auto_device_map, make_plan
    from .profile import compute_module_sizes, find_tied_parameters, profile_model
    from .train import Accelerator


def __getattr__(name: str) -> Any:
    room = _HOME.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{room}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
