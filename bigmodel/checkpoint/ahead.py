"""Bring tensors in ahead of their use, by threads of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from .pages import populate

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
