"""Peaks and limits of allocators that give memory out rounded and in segments which they keep, as PyTorch's for CUDA.

requested   bytes of the tensors
allocated   bytes of the blocks that they were given
reserved    bytes that the process has taken from the device: blocks, what is left of their segments, and what is cached

On other devices, and on virtual ones unless caching is enabled (`virtual.Caching`), the three are one number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import virtual
from .names import DeviceLike, is_accelerator, normalize_device, torch_device


@dataclass(frozen=True)
class MemoryPeaks:
    """The most bytes of a device that were requested, allocated and reserved at any one time, each by itself."""

    requested: int
    allocated: int
    reserved: int

    def beyond(self, held: MemoryPeaks) -> MemoryPeaks:
        """Return what these are above `held`."""
        return MemoryPeaks(
            self.requested - held.requested, self.allocated - held.allocated, self.reserved - held.reserved
        )


def memory_peaks(device: DeviceLike) -> MemoryPeaks:
    """Return the peaks of an accelerator since `reset_peak_memory`; three times the peak of tensors, unless it caches.

    On one that records no peak (mps), they are the bytes of now.
    """
    return _memory(device, "peak")


def memory_now(device: DeviceLike) -> MemoryPeaks:
    """Return the bytes of an accelerator that are requested, allocated and reserved now."""
    return _memory(device, "current")


class _Limit:
    """The limit of one device, for all that asked for one.

    Args:
        name: canonical name of the device.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._others = 0
        self._asked: dict[object, int] = {}

    def add(self, nbytes: int) -> Callable[[], None]:
        """Ask for a limit, on top of those of others and of what was reserved before; return what takes it back."""
        if not self._asked:
            self._others = memory_now(self._name).reserved
        token = object()
        self._asked[token] = nbytes
        self._apply()
        return lambda: self._remove(token)

    def _remove(self, token: object) -> None:
        if self._asked.pop(token, None) is not None:
            self._apply()

    def _apply(self) -> None:
        limit_reserved(self._name, self._others + sum(self._asked.values()) if self._asked else None)


_limits: dict[str, _Limit] = {}


def hold_to(device: DeviceLike, nbytes: int) -> Callable[[], None]:
    """Let the allocator of a device reserve `nbytes` more than it has reserved now, and no more; see `limit_reserved`.

    Several limits of a device add up.

    Returns:
        What takes the limit back, once or more often.
    """
    name = normalize_device(device)
    return _limits.setdefault(name, _Limit(name)).add(nbytes)


def limit_reserved(device: DeviceLike, nbytes: int | None) -> None:
    """Let the allocator of a device reserve at most `nbytes` for this process; None: as many as there are.

    At the limit it gives cached memory back before it reserves more, and raises `torch.OutOfMemoryError` if nothing
    helps. On virtual accelerators without a caching allocator it does nothing.
    """
    target = torch_device(device)
    if target.type == virtual.TYPE and target.index >= virtual.count():
        return  # it has been disabled
    module: Any = torch.get_device_module(target.type)
    total = int(module.mem_get_info(target.index)[1])
    # The half keeps the product with the total, which PyTorch truncates, from falling below `nbytes`.
    share = 1.0 if nbytes is None else min((nbytes + 0.5) / total, 1.0)
    module.set_per_process_memory_fraction(share, target.index)


def _memory(device: DeviceLike, when: str) -> MemoryPeaks:
    target = torch_device(device)
    if not is_accelerator(target):
        raise ValueError(f"{device!r} has no allocator of its own")
    if target.type == "mps":
        held = int(torch.mps.current_allocated_memory())
        return MemoryPeaks(held, held, held)
    stats = torch.get_device_module(target.type).memory_stats(target.index)
    return MemoryPeaks(*(int(stats.get(f"{name}_bytes.all.{when}", 0)) for name in NAMES))


NAMES = ("requested", "allocated", "reserved")
