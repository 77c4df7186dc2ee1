"""Memory of devices: allocated bytes and their peak, free bytes, and the budgets that they give."""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import ItemsView, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil
import torch

from ..errors import DeviceError, SizeError
from . import cgroup, nvml, virtual
from .names import DISK, HOST, DeviceLike, accelerators, device_key, is_accelerator, torch_device
from .sizes import parse_size

logger = logging.getLogger(__name__)

Budget: TypeAlias = "int | str"

NOMINAL_CONTEXT = 512 * 2**20
"""Bytes of CUDA's context on a device that was not measured: about that of PyTorch's kernels on a data-centre GPU."""

NOMINAL_WORKSPACE = 32 * 2**20
"""Bytes of cuBLAS's workspace on a device that was not measured: that of Hopper, the largest."""

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class CachingMemory:
    """Bytes that a device with a caching allocator takes beside tensors.

    Attributes:
        workspace: those that libraries allocate once for products of matrices, for each stream that computes.
        context: those that no tensor gets: of the driver. They are not reserved by the allocator.
    """

    workspace: int = 0
    context: int = 0


def memory_allocated(device: DeviceLike) -> int:
    """Return the bytes that tensors hold on an accelerator; for ``"cpu"``, the process's resident set."""
    target = _target(device)
    if target.type == "cpu":
        return psutil.Process().memory_info().rss
    if target.type == "mps":
        return int(torch.mps.current_allocated_memory())
    return int(torch.get_device_module(target.type).memory_allocated(target.index))


def max_memory_allocated(device: DeviceLike) -> int:
    """Return the peak of `memory_allocated` since `reset_peak_memory`.

    For ``"cpu"`` this is the kernel's own high-water mark of the resident set (``VmHWM``).

    Raises:
        DeviceError: The device does not track its peak (mps; a host without ``/proc``).
    """
    target = _target(device)
    if target.type == "cpu":
        return _status_bytes("VmHWM")
    if target.type == "mps":
        raise DeviceError("mps does not record its peak memory; read memory_allocated instead")
    return int(torch.get_device_module(target.type).max_memory_allocated(target.index))


def reset_peak_memory(device: DeviceLike) -> None:
    """Reset the peak of `device` to the bytes that are allocated now.

    Raises:
        DeviceError: The host's peak cannot be reset (no ``/proc``).
    """
    target = _target(device)
    if target.type == "cpu":
        if not _CLEAR_REFS.exists():
            raise DeviceError("this host has no /proc/self/clear_refs, so its peak memory cannot be reset")
        _CLEAR_REFS.write_text("5")
    elif target.type != "mps":
        torch.get_device_module(target.type).reset_peak_memory_stats(target.index)


class PeakMeter:
    """Measures the most bytes that an accelerator takes beyond what it holds when the meter is made.

    The accelerator's recorded peak is reset then (`reset_peak_memory`), and not later. Whatever allocates on it
    meanwhile is measured. A device that records no peak (mps) is read when `grown` is called.

    Args:
        device: The accelerator.
    """

    def __init__(self, device: DeviceLike) -> None:
        self._device = device
        reset_peak_memory(device)
        self._before = memory_allocated(device)

    def grown(self) -> int:
        """Return the most bytes so far."""
        read = memory_allocated if _target(self._device).type == "mps" else max_memory_allocated
        return read(self._device) - self._before


def free_memory_bytes(device: DeviceLike) -> int:
    """Return the bytes that new tensors on `device` could take.

    On an accelerator this includes what its allocator keeps cached; on the host it respects the control group's limit.
    A CUDA device that this process has not used is not initialised for it: the context that it will need is subtracted.
    """
    target = _target(device)
    if target.type == "cpu":
        available = available_bytes()
        allowed = cgroup.free_bytes()
        return available if allowed is None else min(available, allowed)
    if target.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    if target.type == "cuda" and not nvml.has_context(target.index):
        unused = nvml.free_without_context(target.index)
        if unused is not None:
            return max(unused - NOMINAL_CONTEXT, 0)
    module = torch.get_device_module(target.type)
    free = int(module.mem_get_info(target.index)[0])
    if hasattr(module, "memory_reserved"):
        free += int(module.memory_reserved(target.index)) - int(module.memory_allocated(target.index))
    return free


def caching_memory(device: DeviceLike) -> CachingMemory | None:
    """Return what a device of this machine takes beside tensors, as far as it is known without measuring it.

    Returns:
        None if its allocator does not cache.
    """
    target = torch_device(device)
    if target.type == "cuda":
        return CachingMemory(NOMINAL_WORKSPACE, NOMINAL_CONTEXT)
    if target.type == virtual.TYPE and target.index < len(virtual.board.arenas):
        arena = virtual.board.arenas[target.index]
        return CachingMemory(arena.workspace, arena.memory.context) if arena.is_caching else None
    return None


def physical_bytes() -> int:
    """Return the bytes of the machine's RAM, also without /proc/meminfo, as in some sandboxes."""
    try:
        return int(psutil.virtual_memory().total)
    except OSError:
        return _pages_bytes("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Return the bytes that new memory on the host could take, without regard to control groups.

    Without /proc/meminfo, those that hold nothing, not even cached files.
    """
    try:
        return int(psutil.virtual_memory().available)
    except OSError:
        return _pages_bytes("SC_AVPHYS_PAGES")


def total_host_bytes() -> int:
    """Return the bytes of the host's RAM, or of this process's share of it if a control group limits that."""
    total, allowed = physical_bytes(), cgroup.limit_bytes()
    return total if allowed is None else min(total, allowed)


def release_cached_memory() -> None:
    """Collect garbage and hand the accelerators' cached memory back to their drivers."""
    gc.collect()
    if virtual.count():
        torch.get_device_module(virtual.TYPE).empty_cache()
    elif torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif hasattr(torch, "xpu") and torch.xpu.is_available():
        torch.xpu.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def get_max_memory(max_memory: Mapping[DeviceLike, Budget] | None = None) -> dict[int | str, int]:
    """Return the bytes that may be used of each device.

    Args:
        max_memory: Budgets by device: an int, ``"cuda:0"``, ``torch.device``, ``"mps"``, ``"cpu"`` or ``"disk"``, with
            sizes as `parse_size` accepts them. None: the free bytes of each accelerator (cached ones included) and the
            available RAM of this machine.

    Returns:
        Budgets by device key, in the order accelerators ascending, ``"mps"``, ``"cpu"``, ``"disk"``.

    Raises:
        SizeError: `max_memory` is not a mapping, a budget is not a size, or a device is named twice.
        DeviceError: A key is not a device.
    """
    if max_memory is None:
        found: dict[int | str, int] = {device_key(name): free_memory_bytes(name) for name in accelerators()}
        found[HOST] = free_memory_bytes(HOST)
        return found
    budgets: dict[int | str, int] = {}
    for device, size in budget_items(max_memory):
        key = device_key(device)
        if key in budgets:
            raise SizeError(f"max_memory names device {key!r} twice; give one budget")
        try:
            budgets[key] = parse_size(size)
        except SizeError as error:
            raise SizeError(f"max_memory[{device!r}]: {error}") from None
    _warn_of_absent(budgets)
    return dict(sorted(budgets.items(), key=lambda item: _rank(item[0])))


def budget_items(max_memory: Mapping[DeviceLike, Budget]) -> ItemsView[DeviceLike, Budget]:
    """Return the pairs of device and size of `max_memory`, unparsed.

    Raises:
        SizeError: `max_memory` is not a mapping.
    """
    if not isinstance(max_memory, Mapping):
        raise SizeError(f"max_memory is a {type(max_memory).__name__}; give budgets by device, as in {{'cpu': '8GiB'}}")
    return max_memory.items()


def _target(device: DeviceLike) -> torch.device:
    target = torch_device(device)
    if target.type != "cpu" and not is_accelerator(target):
        raise DeviceError(f"{device!r} has no memory of its own")
    return target


def _status_bytes(field: str) -> int:
    if not _STATUS.exists():
        raise DeviceError(f"this host has no {_STATUS}, so {field} cannot be read")
    match = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise DeviceError(f"{_STATUS} does not list {field}")
    return int(match.group(1)) * 1024


def _pages_bytes(name: str) -> int:
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _warn_of_absent(budgets: Mapping[int | str, int]) -> None:
    present = {device_key(name) for name in accelerators()}
    for key in budgets:
        if is_accelerator(key) and key not in present:
            logger.warning("max_memory names device %r, which this machine does not have", key)


def _rank(key: int | str) -> tuple[int, int, str]:
    if isinstance(key, int):
        return 0, key, ""
    order = {"mps": 2, HOST: 3, DISK: 4}
    if key not in order and not is_accelerator(key):
        raise DeviceError(f"{key!r} is not a device that has a budget")
    return order.get(key, 1), 0, key
