"""Reads the tensors of a checkpoint to their devices, with threads that read ahead."""

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
from ..limits import READERS, STAGING_BYTES
from ..plan.memory.staging import upload_memory
from .checkpoint import Checkpoint
from .match import TensorLoad
from .pages import empty_host, populate, release
from .progress import byte_progress
from .upload import Uploads
from .write import Outgoing, offload

T = TypeVar("T")
_BATCH_BYTES = 32 * 2**20
_BATCH_LENGTH = 512
_BYTES_AHEAD = 128 * 2**20
"""Bytes that threads read ahead: enough to keep a disk busy, and few enough not to be evicted before their use."""


def populated(items: Iterable[T], tensors: Callable[[T], Sequence[torch.Tensor]]) -> Iterator[T]:
    """Yield `items` in order, each once the pages of its tensors are in memory.

    Args:
        items: in the order of their tensors' offsets in the files, so that reading is sequential.
        tensors: returns the CPU tensors of an item.

    Raises:
        CheckpointError: a file cannot be read.
    """
    waiting: deque[tuple[list[T], int, Future[None]]] = deque()
    ahead = 0
    # Not a `with` block: that would complete all queued reads after an error or Ctrl-C.
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-read")
    try:
        for batch, views, nbytes in _batches(items, tensors):
            waiting.append((batch, nbytes, pool.submit(populate, views)))
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
    views: list[torch.Tensor] = []
    nbytes = 0
    for item in items:
        found = tensors(item)
        batch.append(item)
        views += found
        nbytes += sum(tensor.nbytes for tensor in found)
        if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_LENGTH:
            yield batch, views, nbytes
            batch, views, nbytes = [], [], 0
    if batch:
        yield batch, views, nbytes


class Reader:
    """Reads tensors of a checkpoint for a model.

    Tensors on disk become views of their file; nothing is read. Tensors on the CPU in the file's dtype are views too,
    but are paged in at once, which makes no second copy. All others are copied, and cast on the CPU, so that a device
    never holds more than their final bytes.

    Args:
        checkpoint: the checkpoint to read.
        offload_buffers: leave buffers mapped to disk there too, instead of loading them to the CPU.
        offload_folder: folder for tensors on disk that cannot be used in place.
        read_later: do not page in weights on the CPU that can be used in place.
        upload_bytes: pinned memory of each accelerator, as in a plan.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        offload_buffers: bool,
        offload_folder: Path | None,
        read_later: bool = False,
        upload_bytes: int = STAGING_BYTES,
    ) -> None:
        self.checkpoint = checkpoint
        self.offload_buffers = offload_buffers
        self.offload_folder = offload_folder
        self.read_later = read_later
        self._upload_memory = upload_memory(upload_bytes)
        self._fused_results: dict[int, dict[str, torch.Tensor]] = {}

    def read(self, loads: list[TensorLoad]) -> dict[str, torch.Tensor]:
        """Return the value of each load by its name.

        Raises:
            DeviceMapError: tensors mapped to disk cannot be used in place, and `offload_folder` is None.
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
            # To release the pages of a tensor takes a fiftieth of the time of its copy: another thread does it.
            with (
                ThreadPoolExecutor(1, thread_name_prefix="checkpoint-release") as releasing,
                Uploads(_BYTES_AHEAD, self._upload_memory) as uploads,
            ):
                for load in populated(sorted(moving, key=self._file_position), self._views):
                    values[load.name] = self._value(load, uploads, releasing)
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
                f"{first.name} cannot be used in place on disk, for it is {why}; nor can {len(displaced) - 1} others. "
                f"Give offload_folder=, to which {sum(map(_nbytes, displaced))} bytes are written once, or map them to "
                "another device"
            )

    def _file_position(self, load: TensorLoad) -> tuple[str, int]:
        key = load.source.keys[0]
        return self.checkpoint.file(key), self.checkpoint.entry(key).offset

    def _views(self, load: TensorLoad) -> list[torch.Tensor]:
        return [self.checkpoint.tensor(key, resident=True) for key in load.source.keys]

    def _value(self, load: TensorLoad, uploads: Uploads, releasing: ThreadPoolExecutor) -> torch.Tensor:
        """Return the tensor of one load on its device, in its dtype there, whose elements may come with `uploads`.

        The pages that it was copied from are released in `releasing`.
        """
        device = torch_device(load.device)
        if not load.source.in_place:
            return self._fused(load, load.dtype, device)
        view = self._views(load)[0]
        if device.type == HOST and view.dtype == load.dtype and self._is_in_place(load):
            # A buffer is small and may be written to, so it is copied.
            return view.clone() if load.target.is_buffer else view
        if uploads.takes(view, device):
            return uploads.copy(view, load.dtype, device)
        value = _copied(view, load.dtype, device)
        releasing.submit(release, view)
        return value

    def _fused(self, load: TensorLoad, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        fusion = load.source.fusion
        assert fusion is not None
        parts = fusion.parts()
        if parts is None:
            # It may build several tensors: keep the others until they are read.
            results = self._fused_results.get(id(fusion))
            if results is None:
                results = fusion.evaluate(lambda entry: self.checkpoint.tensor(entry.name, resident=True).to(dtype))
                self._fused_results = {id(fusion): results}
            whole = _copied(results.pop(load.name), dtype, device)
        else:
            whole = _empty(load.source.shape, dtype, device)
            views = dict(zip(load.source.keys, self._views(load), strict=True))
            for part in parts:
                view = views[part.key]
                whole[part.index].copy_(view if device.type == HOST else view.to(dtype))
        for view in self._views(load):
            release(view)
        return whole

    def _offloaded(self, displaced: list[TensorLoad], advance: Callable[[int], None]) -> dict[str, torch.Tensor]:
        if not displaced:
            return {}
        assert self.offload_folder is not None

        def read(load: TensorLoad) -> torch.Tensor:
            if load.source.in_place:
                return self._views(load)[0].to(load.dtype)
            return self._fused(load, load.source.dtype, torch.device(HOST))

        outgoing = [
            Outgoing(a.name, a.dtype if a.source.in_place else a.source.dtype, a.source.shape, partial(read, a))
            for a in displaced
        ]
        return offload(self.offload_folder, outgoing, advance)


def _nbytes(load: TensorLoad) -> int:
    return torch.Size(load.source.shape).numel() * load.source.dtype.itemsize


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == HOST:
        return empty_host(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def _copied(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a copy of `value` on `device`, cast on the CPU first."""
    if device.type == HOST:
        return empty_host(tuple(value.shape), dtype).copy_(value)
    return value.to(dtype).to(device)
