"""Batches that process 0 reads, divides among the processes, and sends to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from bigmodel.devices.nested import first_tensor
from bigmodel.errors import TrainError
from bigmodel.train.data.steps import Step
from bigmodel.train.nested import concatenate, find_batch_size, recursively_apply


class BatchPart(NamedTuple):
    """One process's part of a round; see `Step` for the fields."""

    batch: Any
    uneven: bool
    rows: int
    real: int
    total_real: int


def one_each(
    group: list[Any], first: list[Any], processes: int, even: bool, drop_last: bool, size: int | None = None
) -> list[BatchPart]:
    """Give each process one batch of `group`; fill what is missing from `first`, or leave the round out.

    `size` is the number of rows of a whole batch, that of the first one by default.
    """
    rows = [find_batch_size(batch) or 1 for batch in group]
    size, total = size or find_batch_size(first[0]) or 1, sum(rows)
    if len(group) == processes and set(rows) == {size}:
        return [BatchPart(batch, False, row, row, total) for batch, row in zip(group, rows, strict=True)]
    if len(group) < processes and drop_last:
        return []
    if not even and len(group) < processes:
        raise TrainError("with dispatch_batches every process needs a batch at each step; use even_batches=True")
    parts = []
    for rank in range(processes):
        there = rank < len(group)
        batch = group[rank] if there else first[rank % len(first)]
        real = rows[rank] if there else 0
        if even and there and real < size:
            batch = _filled(batch, first[0], size - real)
        parts.append(BatchPart(batch, True, find_batch_size(batch) or 1, real, total))
    return parts


def cut_evenly(
    batch: Any,
    first: Any,
    processes: int,
    even: bool,
    slice_fn: Callable[..., Any] | None = None,
    size: int | None = None,
) -> list[BatchPart]:
    """Cut one batch in a part for each process, filling a short one from `first`.

    `size` is the number of rows of a whole batch, that of the first one by default.
    """
    whole, total = size or find_batch_size(first), find_batch_size(batch)
    if whole is None or total is None:
        raise TrainError("split_batches with dispatch_batches needs batches that hold tensors")
    if whole % processes:
        raise TrainError(f"split_batches: a batch of {whole} does not divide among {processes} processes")
    share = whole // processes
    if not even and total < whole and total <= share * (processes - 1):
        raise TrainError("with dispatch_batches every process needs a batch at each step; use even_batches=True")
    if even and total < whole:
        batch = _filled(batch, first, whole - total)
    parts = []
    for rank in range(processes):
        bounds = slice(rank * share, (rank + 1) * share)
        part = slice_fn(batch, bounds, rank, processes) if slice_fn else _cut(batch, bounds)
        real = min(max(total - rank * share, 0), share)
        parts.append(BatchPart(part, total < whole, find_batch_size(part) or 0, real, total))
    return parts


def _cut(batch: Any, bounds: slice) -> Any:
    rows = find_batch_size(batch)

    def is_rows(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) or (isinstance(leaf, list) and len(leaf) == rows and _holds_no_tensor(leaf))

    return recursively_apply(lambda leaf: leaf[bounds] if not _is_scalar(leaf) else leaf, batch, test_type=is_rows)


def _filled(batch: Any, first: Any, missing: int) -> Any:
    """Return `batch` with `missing` more rows, those of `first`; as it is where rows cannot be joined."""
    rows = find_batch_size(batch) or 0
    pieces = [batch]
    while missing > 0:
        piece = _cut(first, slice(0, missing))
        pieces.append(piece)
        missing -= find_batch_size(piece) or missing
    try:
        return _join(pieces, rows)
    except (RuntimeError, TypeError):  # rows of other lengths (padded differently): keep the short batch
        return batch


def _join(pieces: list[Any], rows: int) -> Any:
    first = pieces[0]
    if isinstance(first, list) and len(first) == rows and _holds_no_tensor(first):
        return [item for piece in pieces for item in piece]
    if isinstance(first, Tensor):
        return torch.cat(pieces) if first.ndim else first
    if isinstance(first, dict):
        return type(first)({key: _join([piece[key] for piece in pieces], rows) for key in first})
    if isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
        return type(first)(_join([piece[i] for piece in pieces], rows) for i in range(len(first)))
    return concatenate(pieces) if first_tensor(first) is not None else first


def _holds_no_tensor(leaf: list[Any]) -> bool:
    return not any(isinstance(item, Tensor) for item in leaf)


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 0


Slicer = Callable[..., Any]


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


class _Placeholder:
    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


class DispatchSource:
    """Process 0 reads a round of batches, and every process gets its part of it.

    Tensors go through `group` as bytes of CPU memory; everything else is pickled between the processes of the run.

    Args:
        base: reads the data; iterated over on process 0 alone.
        group: a process group for CPU tensors, used by nothing else.
        split_batches: cut each batch in parts instead of dealing whole batches.
        slice_fn: cuts a batch: (data, slice, process_index, num_processes) -> part.
    """

    def __init__(
        self,
        base: DataLoader[Any],
        group: Any,
        num_processes: int,
        process_index: int,
        split_batches: bool = False,
        even_batches: bool = True,
        drop_last: bool = False,
        slice_fn: Slicer | None = None,
    ) -> None:
        self.base, self._group = base, group
        self._processes, self._index = num_processes, process_index
        self._split, self._even, self._drop_last = split_batches, even_batches, drop_last
        self._slice_fn = slice_fn

    @property
    def runs_ahead(self) -> bool:
        return True

    def __len__(self) -> int:
        whole = len(self.base)
        if self._split:
            return whole
        return whole // self._processes if self._drop_last else -(-whole // self._processes)

    def open(self, skip: int) -> Iterator[Step]:
        if self._index != 0:
            return self._receive()
        stride = 1 if self._split else self._processes
        with self._announcing_failure():
            batches = islice(iter(self.base), skip * stride, None)
            ahead = list(islice(batches, stride))
        return self._read(batches, ahead, stride)

    def _read(self, batches: Iterator[Any], ahead: list[Any], stride: int) -> Iterator[Step]:
        first = ahead
        with self._announcing_failure():
            while ahead:
                group, ahead = ahead, list(islice(batches, stride))
                parts = self._parts(group, first)
                if parts:
                    yield self._send(parts, last=not ahead)
        self._announce([None] * self._processes)

    @contextmanager
    def _announcing_failure(self) -> Iterator[None]:
        """Tell the other processes of an error here, where they wait for data."""
        try:
            yield
        except Exception as error:
            self._announce([_Failure(f"{type(error).__name__}: {error}")] * self._processes)
            raise

    def _parts(self, group: list[Any], first: list[Any]) -> list[BatchPart]:
        size = self.base.batch_size or getattr(self.base.batch_sampler, "batch_size", None)
        if self._split:
            return cut_evenly(group[0], first[0], self._processes, self._even, self._slice_fn, size)
        return one_each(group, first, self._processes, self._even, self._drop_last, size)

    def _send(self, parts: list[BatchPart], last: bool) -> Step:
        buffers: list[list[Tensor]] = []
        headers: list[Any] = []
        for part in parts:
            tensors: list[Tensor] = []
            skeleton = recursively_apply(lambda leaf, into=tensors: into.append(leaf) or _Placeholder(leaf), part.batch)
            buffers.append(tensors)
            headers.append((skeleton, Step(None, last, part.uneven, part.rows, part.real, part.total_real)))
        self._announce(headers)
        waiting = []
        for rank in range(1, self._processes):
            for tensor in buffers[rank]:
                waiting.append(dist.isend(_as_bytes(tensor.cpu().contiguous()), rank, group=self._group))
        for work in waiting:
            assert work is not None
            work.wait()
        return headers[0][1]._replace(batch=parts[0].batch)

    def _receive(self) -> Iterator[Step]:
        while (header := self._announce(None)) is not None:
            if isinstance(header, _Failure):
                raise TrainError(f"process 0 failed while reading the data: {header.text}")
            skeleton, step = header
            batch = recursively_apply(
                self._receive_one, skeleton, test_type=lambda leaf: isinstance(leaf, _Placeholder)
            )
            yield step._replace(batch=batch)

    def _receive_one(self, placeholder: _Placeholder) -> Tensor:
        tensor = torch.empty(placeholder.shape, dtype=placeholder.dtype)
        dist.recv(_as_bytes(tensor), 0, group=self._group)
        return tensor

    def _announce(self, headers: list[Any] | None) -> Any:
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, headers, src=0, group=self._group)
        return mine[0]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
