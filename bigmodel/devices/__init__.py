"""Devices: their names, their memory, and copies to them."""

from __future__ import annotations

from . import virtual
from .memory import (
    PeakMeter,
    free_memory_bytes,
    get_max_memory,
    max_memory_allocated,
    memory_allocated,
    release_cached_memory,
    reset_peak_memory,
    total_host_bytes,
)
from .names import (
    DISK,
    HOST,
    DeviceLike,
    accelerator_type,
    accelerators,
    check_present,
    device_key,
    is_accelerator,
    normalize_device,
    torch_device,
)
from .sizes import format_size, parse_size
from .streams import CopyStream, Event, copy_stream, wait_for_copies

__all__ = [
    "DISK",
    "HOST",
    "CopyStream",
    "DeviceLike",
    "Event",
    "PeakMeter",
    "accelerator_type",
    "accelerators",
    "check_present",
    "copy_stream",
    "device_key",
    "format_size",
    "free_memory_bytes",
    "get_max_memory",
    "is_accelerator",
    "max_memory_allocated",
    "memory_allocated",
    "normalize_device",
    "parse_size",
    "release_cached_memory",
    "reset_peak_memory",
    "torch_device",
    "total_host_bytes",
    "virtual",
    "wait_for_copies",
]

virtual.enable_from_environment()
