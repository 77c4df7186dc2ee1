"""Pinned host memory: a GPU copies from it at full speed, asynchronously; the kernel can neither move nor swap it."""

from __future__ import annotations

import torch

from . import virtual
from .names import HOST
from .streams import has_streams
from .virtual.pinned import pinned_bytes as pinned_bytes


def copies_from_pinned(device: torch.device) -> bool:
    """Whether copies from pinned memory to `device` are faster than others, or asynchronous."""
    return device.type == "cuda" or (device.type == virtual.TYPE and has_streams(device))


def empty_host(nbytes: int, pin: bool) -> torch.Tensor:
    """Return a new host tensor of `nbytes` uint8, pinned for the machine's accelerator if `pin`."""
    if pin and virtual.count():
        return virtual.pinned_memory.empty(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=pin)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor lies in pinned memory."""
    return virtual.pinned_memory.holds(tensor) if virtual.count() else tensor.is_pinned()


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a host tensor in pinned memory."""
    copied = empty_host(tensor.nbytes, pin=True).view(tensor.dtype).view(tensor.shape)
    return copied.copy_(tensor)


def release_unused_pinned() -> None:
    """Give back pinned memory that no tensor uses. PyTorch keeps it for others of the same rounded size; virtual
    accelerators keep none."""
    release = getattr(torch.accelerator, "empty_host_cache", None)
    if release is not None and not virtual.count() and torch.cuda.is_available() and torch.cuda.is_initialized():
        release()


def on_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `host` on `device`; the host does not wait for the copy where pinned memory allows that."""
    if not copies_from_pinned(device) or not host.numel():
        return host.to(device)
    return pinned_copy(host).to(device, non_blocking=True)
