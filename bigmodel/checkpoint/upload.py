"""Copies of a checkpoint's tensors to accelerators, beside the reads of others: through pinned memory filled by several
threads, or, on a device without streams, by the thread of a copy stream.

A copy of mapped or pageable memory holds the thread that asks for it, on a GPU at a part of the link's speed. Here
threads move pieces of tensors to pinned memory, cast on the way, and queue their copies: reading, casting and the link
work at the same time.
"""

from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import TracebackType

import torch

from ..devices import Event, copy_stream
from ..devices.names import HOST
from ..devices.pinned import copies_from_pinned, empty_host, release_unused_pinned
from ..devices.streams import PAST, HostEvent, has_streams
from ..limits import READERS
from ..plan.memory.staging import StagingMemory
from .pages import release


class _PinnedPiece:
    """Pinned memory for one copy, from its first use on, and the event of the last copy from it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory: torch.Tensor | None = None
        self.copied: Event | None = None

    @property
    def memory(self) -> torch.Tensor:
        """The memory, allocated by itself: what is pinned for each tensor is rounded up to a power of two."""
        if self._memory is None:
            self._memory = empty_host(self._nbytes, pin=True)
        return self._memory


class Uploads:
    """Copies tensors to accelerators while others are read. Within the context copies are under way; after it, done.

    Args:
        bytes_ahead: Bytes that may wait for their copy: beyond, `copy` waits.
        memory: Pinned memory of each device; without any chunks, `takes` takes nothing for devices with streams.
    """

    def __init__(self, bytes_ahead: int, memory: StagingMemory) -> None:
        self._bytes_ahead = bytes_ahead
        self._memory = memory
        self._waiting: deque[tuple[torch.Tensor, list[Event]]] = deque()
        self._ahead = 0
        self._devices: dict[torch.device, DeviceUploads | ThreadUploads] = {}

    def __enter__(self) -> Uploads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all copies; after an error, only for those that have begun. Give the pinned memory back.

        Raises:
            Exception: The error of a copy.
        """
        try:
            if error is None:
                while self._waiting:
                    self._finish_first()
        finally:
            for device in self._devices.values():
                device.close()
            if self._devices:
                self._devices.clear()
                release_unused_pinned()

    def takes(self, source: torch.Tensor, device: torch.device) -> bool:
        """Whether a copy of `source`, a tensor on the host, to `device` can be made beside the reads of others."""
        if device.type == HOST or source.numel() == 0:
            return False
        staged = self._memory.chunks > 0 and copies_from_pinned(device) and source.is_contiguous()
        return staged or not has_streams(device)

    def copy(self, source: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor on `device` that will hold the elements of `source` as `dtype` when this context ends.

        Pages of `source` are released once they are copied.

        Raises:
            Exception: The error of an earlier copy.
        """
        if device not in self._devices:
            staged = has_streams(device)
            self._devices[device] = DeviceUploads(device, self._memory) if staged else ThreadUploads(device)
        target, copies = self._devices[device].begin(source, dtype)
        self._waiting.append((source, copies))
        self._ahead += source.nbytes
        while self._ahead > self._bytes_ahead:
            self._finish_first()
        return target

    def _finish_first(self) -> None:
        source, copies = self._waiting.popleft()
        for each in copies:
            each.wait()
        self._ahead -= source.nbytes
        release(source)


class DeviceUploads:
    """Pinned memory, threads and the stream of the copies to one device."""

    def __init__(self, device: torch.device, memory: StagingMemory) -> None:
        self._device = device
        self._stream = copy_stream(device)
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix=f"upload to {device}")
        self._inference = torch.is_inference_mode_enabled()
        self._piece_bytes, self._count = memory
        self._pieces: queue.SimpleQueue[_PinnedPiece] = queue.SimpleQueue()
        for _ in range(self._count):
            self._pieces.put(_PinnedPiece(self._piece_bytes))

    def begin(self, source: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, list[Event]]:
        """Return a new tensor on the device, and events of the copies of the pieces of `source` to it."""
        target = torch.empty(source.shape, dtype=dtype, device=self._device)
        self._stream.uses(target)
        # The memory may have had an owner whose compute is still queued.
        free = self._stream.compute_mark()
        step = self._piece_bytes // dtype.itemsize
        parts = zip(source.reshape(-1).split(step), target.view(-1).split(step), strict=True)
        return target, [HostEvent(self._pool.submit(self._copy, part, into, free)) for part, into in parts]

    def _copy(self, source: torch.Tensor, target: torch.Tensor, free: Event) -> None:
        piece = self._pieces.get()
        try:
            if piece.copied is not None:
                piece.copied.synchronize()
            with torch.inference_mode(self._inference), torch.no_grad():
                staged = piece.memory[: target.nbytes].view(target.dtype).copy_(source)
                piece.copied = self._stream.submit(partial(_queue, target, staged), [free], target.nbytes)
        finally:
            self._pieces.put(piece)

    def close(self) -> None:
        """Wait for the copies that have begun, so that all later work runs after them, and drop the others."""
        self._pool.shutdown(cancel_futures=True)
        for _ in range(self._count):
            copied = self._pieces.get().copied
            if copied is not None:
                copied.synchronize()


class ThreadUploads:
    """The copies to a device without streams, one behind the other: its link does not wait while tensors are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copy_stream(device)
        self._inference = torch.is_inference_mode_enabled()
        self._last: Event = PAST
        self._is_closed = False

    def begin(self, source: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, list[Event]]:
        """Return a new tensor on the device, and the event of the copy of `source` to it."""
        target = torch.empty(source.shape, dtype=dtype, device=self._device)
        self._last = self._stream.submit(partial(self._copy, source, target), nbytes=target.nbytes)
        return target, [self._last]

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if not self._is_closed:
            with torch.inference_mode(self._inference), torch.no_grad():
                target.copy_(source.to(target.dtype))

    def close(self) -> None:
        """Wait for the copy that has begun, and drop the others."""
        self._is_closed = True
        with suppress(Exception):  # its error is raised where it is waited for first, or another one is raised already
            self._last.wait()


def _queue(target: torch.Tensor, staged: torch.Tensor) -> None:
    target.copy_(staged, non_blocking=True)
