"""Dispatch: makes a planned model run."""

from __future__ import annotations

from .dispatch import dispatch_model
from .dispatched import quantization_errors
from .load import load_checkpoint_and_dispatch
from .move import send_to_device
from .offload import UserCpuOffloadHook, cpu_offload, cpu_offload_with_hook, disk_offload
from .pretrained import from_pretrained, get_plan
from .training import dispatched_parts, is_streamed, prepare_training
from .undispatch import undispatch

__all__ = [
    "UserCpuOffloadHook",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "dispatched_parts",
    "from_pretrained",
    "get_plan",
    "is_streamed",
    "load_checkpoint_and_dispatch",
    "prepare_training",
    "quantization_errors",
    "send_to_device",
    "undispatch",
]
