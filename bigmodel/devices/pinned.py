"""Pinned host memory: a GPU copies from it at full speed, asynchronously; the kernel can neither move nor swap it.

There are two kinds. PyTorch's allocator (`empty_host`) caches its memory and rounds it up to a power of two: right for
chunks that come and go. Weights stay, and would take up to twice their bytes: theirs (`empty_weights`) is ordinary
memory that is registered with CUDA, to the page.
"""

from __future__ import annotations

import mmap
import os

import torch

from . import virtual
from .names import HOST
from .streams import has_streams
from .virtual.pinned import PAGE
from .virtual.pinned import pinned_bytes as pinned_bytes

_PORTABLE = 1
"""`cudaHostRegisterPortable`: the memory is pinned for every GPU of the process."""


def copies_from_pinned(device: torch.device) -> bool:
    """Whether copies from pinned memory to `device` are faster than others, or asynchronous."""
    return device.type == "cuda" or (device.type == virtual.TYPE and has_streams(device))


def empty_host(nbytes: int, pin: bool) -> torch.Tensor:
    """Return a new host tensor of `nbytes` uint8, pinned for the machine's accelerator if `pin`."""
    if pin and virtual.count():
        return virtual.pinned_memory.empty(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=pin)


def empty_weights(nbytes: int, pin: bool) -> torch.Tensor:
    """Return a new host tensor of `nbytes` uint8 for weights that stay there, pinned for the machine's accelerator if
    `pin`. What is pinned is rounded up to pages only: `registered_bytes`.

    Raises:
        RuntimeError: CUDA cannot pin so much.
    """
    if not pin or not nbytes:
        return empty_host(nbytes, pin=False)
    if virtual.count():
        return virtual.pinned_memory.empty(nbytes, rounded=False)
    return torch.frombuffer(_Registered(nbytes), dtype=torch.uint8)[:nbytes]


def registered_bytes(nbytes: int) -> int:
    """Return the bytes that `empty_weights` pins for `nbytes`: whole pages."""
    return -(-nbytes // PAGE) * PAGE


class _Registered(mmap.mmap):
    """Anonymous memory that is registered with CUDA until nobody refers to it.

    A tensor made from it refers to it, so that it is unregistered right before the kernel takes it back.
    """

    def __new__(cls, nbytes: int) -> _Registered:
        return super().__new__(cls, -1, registered_bytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, nbytes: int) -> None:
        del nbytes  # `mmap` takes it in `__new__`
        self._process = 0
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        torch.cuda.init()
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, len(self), _PORTABLE)))
        self._address, self._process = address, os.getpid()

    def __del__(self) -> None:
        if self._process != os.getpid():  # never registered, or by the process that this one was forked from
            return
        # A copy from it may still be queued: CUDA does not know that memory which it did not allocate is in use.
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):  # asking others would create their contexts
                torch.cuda.synchronize(index)
        torch.cuda.cudart().cudaHostUnregister(self._address)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor lies in pinned memory."""
    return virtual.pinned_memory.holds(tensor) if virtual.count() else tensor.is_pinned()


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a host tensor in pinned memory that PyTorch caches."""
    copied = empty_host(tensor.nbytes, pin=True).view(tensor.dtype).view(tensor.shape)
    return copied.copy_(tensor)


def pinned_weights(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a host tensor in pinned memory for weights."""
    copied = empty_weights(tensor.nbytes, pin=True).view(tensor.dtype).view(tensor.shape)
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
