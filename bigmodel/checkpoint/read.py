"""Reads the tensors of a checkpoint for a model, each to its device, with threads that read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ..devices import DISK, HOST, torch_device
from ..errors import DeviceMapError
from .checkpoint import Checkpoint
from .match import TensorLoad
from .pages import empty_host, populate, release
from .progress import byte_progress
from .write import Outgoing, offload

T = TypeVar("T")
_THREADS = 2
_BATCH_BYTES = 32 * 2**20
_BATCH_LENGTH = 512
_BYTES_AHEAD = 128 * 2**20
"""How far threads read ahead: enough to keep a disk busy, not so much that the kernel evicts it before its use."""


def populated(items: Iterable[T], tensors: Callable[[T], Sequence[torch.Tensor]]) -> Iterator[T]:
    """Yield `items` in order, each once the pages of its tensors are in memory.

    Args:
        items: in the order in which their tensors lie in their files, so that reading is sequential.
        tensors: gives the CPU tensors of an item.

    Raises:
        CheckpointError: a file cannot be read.
    """
    waiting: deque[tuple[list[T], int, Future[None]]] = deque()
    ahead = 0
    # Not a `with` block: that would finish all that waits after an error or a Ctrl-C.
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-read")
    try:
        for batch, shown, nbytes in _batches(items, tensors):
            waiting.append((batch, nbytes, pool.submit(populate, shown)))
            ahead += nbytes
            while ahead > _BYTES_AHEAD:
                done, size, future = waiting.popleft()
                future.result()
                ahead -= size
                yield from done
        for done, _, future in waiting:
            future.result()
            yield from done
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(
    items: Iterable[T], tensors: Callable[[T], Sequence[torch.Tensor]]
) -> Iterator[tuple[list[T], list[torch.Tensor], int]]:
    batch: list[T] = []
    shown: list[torch.Tensor] = []
    nbytes = 0
    for item in items:
        found = tensors(item)
        batch.append(item)
        shown += found
        nbytes += sum(tensor.nbytes for tensor in found)
        if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_LENGTH:
            yield batch, shown, nbytes
            batch, shown, nbytes = [], [], 0
    if batch:
        yield batch, shown, nbytes


class Reader:
    """Reads tensors of a checkpoint for a model.

    What stays on disk becomes a view of its file: nothing is read. So does what goes to the CPU in the dtype it has in
    the file, but its pages are brought in at once: as fast as the page cache gives, without a second copy. All else
    is copied: cast on the CPU, for then a device never holds more than what it keeps.

    Args:
        checkpoint: where the tensors lie.
        offload_buffers: buffers for the disk stay there, too, instead of coming to the CPU.
        offload_folder: where tensors for the disk go that cannot be used where they lie.
        read_later: weights for the CPU are not read either, where they can be used in their file.
    """

    def __init__(
        self, checkpoint: Checkpoint, offload_buffers: bool, offload_folder: Path | None, read_later: bool = False
    ) -> None:
        self.checkpoint = checkpoint
        self.offload_buffers = offload_buffers
        self.offload_folder = offload_folder
        self.read_later = read_later
        self._made: dict[int, dict[str, torch.Tensor]] = {}

    def read(self, loads: list[TensorLoad]) -> dict[str, torch.Tensor]:
        """The value of each load by its name.

        Raises:
            DeviceMapError: tensors for the disk cannot lie there in place, and there is no folder for them.
            CheckpointError: a file cannot be read.
        """
        values: dict[str, torch.Tensor] = {}
        moving: list[TensorLoad] = []
        displaced: list[TensorLoad] = []
        for load in loads:
            if not (self._stays_on_disk(load) or self._is_read_later(load)):
                moving.append(load)
            elif self._is_in_place(load):
                values[load.name] = self.checkpoint.tensor(load.source.keys[0])
            else:
                displaced.append(load)
        self._refuse_without_folder(displaced)
        with byte_progress("Loading", sum(_nbytes(load) for load in moving + displaced)) as advance:
            for load in populated(sorted(moving, key=self._place), self._views):
                values[load.name] = self._value(load)
                advance(_nbytes(load))
            values |= self._offloaded(displaced, advance)
        return values

    def _stays_on_disk(self, load: TensorLoad) -> bool:
        return load.device == DISK and (self.offload_buffers or not load.target.is_buffer)

    def _is_read_later(self, load: TensorLoad) -> bool:
        uncast = load.dtype == load.source.dtype and not load.target.is_buffer
        return self.read_later and load.device == HOST and uncast and self._is_in_place(load)

    def _is_in_place(self, load: TensorLoad) -> bool:
        return load.source.in_place and self.checkpoint.is_mappable(load.source.keys[0])

    def _refuse_without_folder(self, displaced: list[TensorLoad]) -> None:
        if displaced and self.offload_folder is None:
            first = displaced[0]
            why = "stored unaligned or in an old format" if first.source.in_place else "fused from several tensors"
            raise DeviceMapError(
                f"{first.name} cannot lie on disk in place, for it is {why}; nor can {len(displaced) - 1} others. Give "
                f"offload_folder=, where {sum(map(_nbytes, displaced))} bytes are written once, or map them elsewhere"
            )

    def _place(self, load: TensorLoad) -> tuple[str, int]:
        key = load.source.keys[0]
        return self.checkpoint.file(key), self.checkpoint.entry(key).offset

    def _views(self, load: TensorLoad) -> list[torch.Tensor]:
        return [self.checkpoint.tensor(key, resident=True) for key in load.source.keys]

    def _value(self, load: TensorLoad) -> torch.Tensor:
        """The tensor of one load, where it goes, in the dtype it runs in."""
        device = torch_device(load.device)
        if not load.source.in_place:
            return self._fused(load, load.dtype, device)
        view = self._views(load)[0]
        if device.type == HOST and view.dtype == load.dtype and self._is_in_place(load):
            # A buffer is small and written to: it gets memory of its own.
            return view.clone() if load.target.is_buffer else view
        value = _copied(view, load.dtype, device)
        release(view)
        return value

    def _fused(self, load: TensorLoad, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        fusion = load.source.fusion
        assert fusion is not None
        parts = fusion.parts()
        if parts is None:
            # It may make several tensors: keep the others until they are asked for.
            made = self._made.get(id(fusion))
            if made is None:
                made = fusion.evaluate(lambda entry: self.checkpoint.tensor(entry.name, resident=True).to(dtype))
                self._made = {id(fusion): made}
            whole = _copied(made.pop(load.name), dtype, device)
        else:
            whole = _empty(load.source.shape, dtype, device)
            views = dict(zip(load.source.keys, self._views(load), strict=True))
            for piece in parts:
                view = views[piece.key]
                whole[piece.index].copy_(view if device.type == HOST else view.to(dtype))
        for view in self._views(load):
            release(view)
        return whole

    def _offloaded(self, displaced: list[TensorLoad], advance: Callable[[int], None]) -> dict[str, torch.Tensor]:
        if not displaced:
            return {}
        assert self.offload_folder is not None

        def read(load: TensorLoad) -> torch.Tensor:
            if load.source.in_place:
                return self._views(load)[0]
            return self._fused(load, load.source.dtype, torch.device(HOST))

        outgoing = [Outgoing(a.name, a.source.dtype, a.source.shape, partial(read, a)) for a in displaced]
        return offload(self.offload_folder, outgoing, advance)


def _nbytes(load: TensorLoad) -> int:
    return torch.Size(load.source.shape).numel() * load.source.dtype.itemsize


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == HOST:
        return empty_host(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def _copied(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`value` in memory of its own on `device`; cast on the CPU first."""
    if device.type == HOST:
        return empty_host(tuple(value.shape), dtype).copy_(value)
    return value.to(dtype).to(device)
