"""Queries of NVIDIA's management library: they need no CUDA context, which takes half a gigabyte and a second."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch


class _NvmlMemory(ctypes.Structure):
    """``nvmlMemory_t``."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    """``nvmlProcessInfo_t``."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


_Processes = _Process * 256
_UNKNOWN = 2**64 - 1
"""The library's answer for a process whose memory it does not know."""


def has_context(index: int) -> bool:
    """Whether this process has a context on CUDA device `index`."""
    return torch.cuda.is_initialized() and bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]


def free_without_context(index: int) -> int | None:
    """Return the free bytes of CUDA device `index`, as PyTorch counts devices; None if the library does not say."""
    memory = _NvmlMemory()
    found = _handle(index)
    if found is None or found[0].nvmlDeviceGetMemoryInfo(found[1], ctypes.byref(memory)):
        return None
    return int(memory.free)


def used_by_this_process(index: int) -> int | None:
    """Return the bytes of CUDA device `index` that this process takes, its context included; None if the library does
    not say, as in containers whose process numbers it does not know."""
    found = _handle(index)
    if found is None:
        return None
    library, handle = found
    count = ctypes.c_uint(len(_Processes()))
    processes = _Processes()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes):
        return None
    ours = [int(each.used) for each in processes[: count.value] if each.pid == os.getpid()]
    return ours[0] if ours and ours[0] != _UNKNOWN else None


def _handle(index: int) -> tuple[Any, ctypes.c_void_p] | None:
    """Return the library and its handle of a device; None if it has none."""
    library = nvml_library()
    if library is None:
        return None
    handle = ctypes.c_void_p()
    try:
        number = int(torch.cuda._get_nvml_device_index(index))  # CUDA_VISIBLE_DEVICES renumbers devices
    except (RuntimeError, AttributeError, ImportError):
        return None
    return None if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) else (library, handle)


@cache
def nvml_library() -> Any:
    """Return the library, initialised; None if there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
