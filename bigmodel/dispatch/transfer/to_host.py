"""Copies of device tensors to new memory of the host, through pinned memory.

A copy to pageable memory holds the host for each tensor, and goes through a buffer of the driver. Here copies are
queued to pinned memory, many tensors at once, and the host waits once for each of its two halves, while the other one
is being filled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...devices import HOST, Event
from ...devices.pinned import copies_from_pinned, empty_host
from ...devices.streams import compute_mark
from ...limits import ALIGNMENT, FILE_ALIGNMENT, GRADIENT_BYTES


def copied_to_host(
    tensors: Sequence[torch.Tensor | None], likes: Sequence[torch.Tensor], staging_bytes: int = GRADIENT_BYTES
) -> list[torch.Tensor | None]:
    """Return `tensors` with the devices and dtypes of `likes`, as ``Tensor.to`` would; the values are there on return.

    Args:
        tensors: Tensors on a device, written on its current stream; None stays None.
        likes: As many tensors, on the host or elsewhere.
        staging_bytes: Pinned memory, always as much, so that what PyTorch keeps of it is used again. Less than a page:
            tensors are copied one by one, without it.
    """
    found: list[torch.Tensor | None] = []
    staged: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for tensor, like in zip(tensors, likes, strict=True):
        if tensor is None or staging_bytes < FILE_ALIGNMENT or not _is_staged(tensor, like):
            found.append(None if tensor is None else tensor.to(like.device, like.dtype))
            continue
        source = _dense(tensor.to(like.dtype))
        target = torch.empty_like(source, device=HOST)
        found.append(target)
        staged.setdefault(tensor.device, []).append((_flat(source), _flat(target)))
    for device, pairs in staged.items():
        _copy_all(device, pairs, staging_bytes)
    return found


def _is_staged(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether `tensor` goes through pinned memory to the device of `like`."""
    return like.device.type == HOST and copies_from_pinned(tensor.device) and tensor.layout is torch.strided


def _copy_all(device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]], nbytes: int) -> None:
    """Copy each flat tensor on `device` to the flat one of the host beside it, through `nbytes` of pinned memory."""
    half = nbytes // 2 // ALIGNMENT * ALIGNMENT
    pieces = [_BatchOfCopies(part, device) for part in empty_host(nbytes, pin=True).split(half)[:2]]
    number = 0
    for source, target in pairs:
        begin = 0
        while begin < source.numel():
            queued = pieces[number].queue(source[begin:], target[begin:])
            if not queued:
                pieces[number].close()
                number = (number + 1) % len(pieces)
                pieces[number].empty()
            begin += queued
    pieces[number].close()
    for _ in pieces:
        number = (number + 1) % len(pieces)
        pieces[number].empty()


class _BatchOfCopies:
    """Pinned memory for copies that the host waits for together."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._memory = memory
        self._device = device
        self._used = 0
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrived: Event | None = None

    def queue(self, source: torch.Tensor, target: torch.Tensor) -> int:
        """Queue a copy of as many elements of `source`, for `target`, as there is memory for; return how many."""
        size = source.element_size()
        count = min(source.numel(), (self._memory.nbytes - self._used) // size)
        if count > 0:
            pinned = self._memory[self._used : self._used + count * size].view(source.dtype)
            pinned.copy_(source[:count], non_blocking=True)
            self._parts.append((target[:count], pinned))
            self._used += -(-count * size // ALIGNMENT) * ALIGNMENT
        return max(count, 0)

    def close(self) -> None:
        """Record the event behind the copies that are queued."""
        self._arrived = compute_mark(self._device) if self._parts else None

    def empty(self) -> None:
        """Wait for the queued copies, if any, and move them to where they belong."""
        if self._arrived is not None:
            self._arrived.synchronize()
        for target, pinned in self._parts:
            target.copy_(pinned)
        self._used, self._parts, self._arrived = 0, [], None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a contiguous copy of one whose elements overlap or leave gaps."""
    tensor = tensor.resolve_conj().resolve_neg()
    strides = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
