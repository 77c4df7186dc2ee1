"""Bring tensors in ahead of their use, by threads of their own.

Make the tensors that a load has decided on, each where it goes.
"""

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
from .match import Assignment
from .pages import empty_host, populate, release
from .progress import byte_progress
from .write import Outgoing, offload

T = TypeVar("T")
_THREADS = 2
_BATCH_BYTES = 32 * 2**20
_BATCH_LENGTH = 512
_BYTES_AHEAD = 128 * 2**20
"""How far reading may run ahead: far enough to keep a disk busy, not so far that the kernel lets go of it again."""


def populated(items: Iterable[T], tensors: Callable[[T], Sequence[torch.Tensor]]) -> Iterator[T]:
    """Yield `items` in order, each when the pages behind its tensors are in memory.

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

    def read(self, assignments: list[Assignment]) -> dict[str, torch.Tensor]:
        """The value of each assignment by its name.

        Raises:
            DeviceMapError: tensors for the disk cannot lie there in place, and there is no folder for them.
            CheckpointError: a file cannot be read.
        """
        values: dict[str, torch.Tensor] = {}
        moving: list[Assignment] = []
        displaced: list[Assignment] = []
        for assignment in assignments:
            if not (self._stays_on_disk(assignment) or self._is_read_later(assignment)):
                moving.append(assignment)
            elif self._is_in_place(assignment):
                values[assignment.name] = self.checkpoint.tensor(assignment.source.keys[0])
            else:
                displaced.append(assignment)
        self._refuse_without_folder(displaced)
        with byte_progress("Loading", sum(_nbytes(assignment) for assignment in moving + displaced)) as advance:
            for assignment in populated(sorted(moving, key=self._place), self._views):
                values[assignment.name] = self._value(assignment)
                advance(_nbytes(assignment))
            values |= self._offloaded(displaced, advance)
        return values

    def _stays_on_disk(self, assignment: Assignment) -> bool:
        return assignment.device == DISK and (self.offload_buffers or not assignment.slot.is_buffer)

    def _is_read_later(self, assignment: Assignment) -> bool:
        uncast = assignment.dtype == assignment.source.dtype and not assignment.slot.is_buffer
        return self.read_later and assignment.device == HOST and uncast and self._is_in_place(assignment)

    def _is_in_place(self, assignment: Assignment) -> bool:
        return assignment.source.in_place and self.checkpoint.is_mappable(assignment.source.keys[0])

    def _refuse_without_folder(self, displaced: list[Assignment]) -> None:
        if displaced and self.offload_folder is None:
            first = displaced[0]
            why = "stored unaligned or in an old format" if first.source.in_place else "fused from several tensors"
            raise DeviceMapError(
                f"{first.name} cannot lie on disk in place, for it is {why}; nor can {len(displaced) - 1} others. Give "
                f"offload_folder=, where {sum(map(_nbytes, displaced))} bytes are written once, or map them elsewhere"
            )

    def _place(self, assignment: Assignment) -> tuple[str, int]:
        key = assignment.source.keys[0]
        return self.checkpoint.file(key), self.checkpoint.entry(key).offset

    def _views(self, assignment: Assignment) -> list[torch.Tensor]:
        return [self.checkpoint.tensor(key, resident=True) for key in assignment.source.keys]

    def _value(self, assignment: Assignment) -> torch.Tensor:
        """The tensor of one assignment, where it goes, in the dtype it runs in."""
        device = torch_device(assignment.device)
        if not assignment.source.in_place:
            return self._fused(assignment, assignment.dtype, device)
        view = self._views(assignment)[0]
        if device.type == HOST and view.dtype == assignment.dtype and self._is_in_place(assignment):
            # A buffer is small and written to: it gets memory of its own.
            return view.clone() if assignment.slot.is_buffer else view
        value = _copied(view, assignment.dtype, device)
        release(view)
        return value

    def _fused(self, assignment: Assignment, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        fusion = assignment.source.fusion
        assert fusion is not None
        pieces = fusion.pieces()
        if pieces is None:
            # It may make several tensors: keep the others until they are asked for.
            made = self._made.get(id(fusion))
            if made is None:
                made = fusion.evaluate(lambda entry: self.checkpoint.tensor(entry.name, resident=True).to(dtype))
                self._made = {id(fusion): made}
            whole = _copied(made.pop(assignment.name), dtype, device)
        else:
            whole = _empty(assignment.source.shape, dtype, device)
            views = dict(zip(assignment.source.keys, self._views(assignment), strict=True))
            for piece in pieces:
                view = views[piece.key]
                whole[piece.index].copy_(view if device.type == HOST else view.to(dtype))
        for view in self._views(assignment):
            release(view)
        return whole

    def _offloaded(self, displaced: list[Assignment], advance: Callable[[int], None]) -> dict[str, torch.Tensor]:
        if not displaced:
            return {}
        assert self.offload_folder is not None

        def read(assignment: Assignment) -> torch.Tensor:
            if assignment.source.in_place:
                return self._views(assignment)[0]
            return self._fused(assignment, assignment.source.dtype, torch.device(HOST))

        outgoing = [Outgoing(a.name, a.source.dtype, a.source.shape, partial(read, a)) for a in displaced]
        return offload(self.offload_folder, outgoing, advance)


def _nbytes(assignment: Assignment) -> int:
    return torch.Size(assignment.source.shape).numel() * assignment.source.dtype.itemsize


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == HOST:
        return empty_host(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def _copied(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`value` in memory of its own on `device`; cast on the CPU first."""
    if device.type == HOST:
        return empty_host(tuple(value.shape), dtype).copy_(value)
    return value.to(dtype).to(device)
