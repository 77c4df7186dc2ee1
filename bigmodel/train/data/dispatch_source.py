"""Batches that process 0 reads, splits among the processes, and sends to the others."""

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
from bigmodel.train.data.steps import LoaderStep, PicklableSource
from bigmodel.train.nested import concatenate, find_batch_size, recursively_apply

Slicer = Callable[..., Any]

NO_ROWS = "with dispatch_batches every process needs a batch at each step; use even_batches=True"


class BatchPart(NamedTuple):
    """One process's part of a round; fields as in `LoaderStep`."""

    batch: Any
    uneven: bool
    rows: int
    real: int
    total_real: int


def one_each(
    group: list[Any], first: list[Any], processes: int, even: bool, size: int | None = None
) -> list[BatchPart]:
    """Assign each process one batch of a round; the rows of an incomplete round are divided among all.

    Rows that cannot be concatenated are not divided: processes without a batch of their own repeat one of the first
    round.

    Args:
        group: the batches of the round, at most one per process.
        first: the batches of the first round, with which an incomplete round is filled.
        processes: number of processes.
        even: whether all processes must get equally many rows.
        size: rows of a full batch; None: those of the first batch.

    Raises:
        TrainError: the round leaves a process without rows and is not filled.
    """
    rows = [find_batch_size(batch) or 1 for batch in group]
    size, total = size or find_batch_size(first[0]) or 1, sum(rows)
    if len(group) == processes and set(rows) == {size}:
        return [BatchPart(batch, False, row, row, total) for batch, row in zip(group, rows, strict=True)]
    joined = _concatenated(group, rows[0])
    if find_batch_size(joined) == total:
        parts = _divided(joined, first[0], total, processes, even)
        if all(part.rows for part in parts):
            return parts
    if not even and len(group) < processes:
        raise TrainError(NO_ROWS)
    parts = []
    for rank in range(processes):
        batch = group[rank] if rank < len(group) else first[rank % len(first)]
        real = rows[rank] if rank < len(group) else 0
        parts.append(BatchPart(batch, True, find_batch_size(batch) or 1, real, total))
    return parts


def cut_evenly(
    batch: Any,
    first: Any,
    processes: int,
    even: bool,
    slice_fn: Slicer | None = None,
    size: int | None = None,
) -> list[BatchPart]:
    """Split one batch into a part for each process.

    Args:
        batch: the batch.
        first: the first batch, with which a short one is filled.
        processes: number of processes.
        even: whether all processes must get equally many rows.
        slice_fn: as for `DispatchSource`; None slices every tensor.
        size: rows of a full batch; None: those of the first batch.

    Raises:
        TrainError: the batch cannot be split, or leaves a process without rows.
    """
    whole, total = size or find_batch_size(first), find_batch_size(batch)
    if whole is None or total is None:
        raise TrainError("split_batches with dispatch_batches needs batches that hold tensors")
    if whole % processes:
        raise TrainError(
            f"split_batches: a batch of {whole} does not divide among {processes} processes: "
            "it must be a round multiple of them"
        )
    if not even and total < processes:
        raise TrainError(NO_ROWS)
    parts = _divided(batch, first, total, processes, even, slice_fn)
    return [part._replace(uneven=total < whole) for part in parts]


def _divided(
    batch: Any, first: Any, total: int, processes: int, even: bool, slice_fn: Slicer | None = None
) -> list[BatchPart]:
    """Divide the `total` rows of a batch among processes, with rows of `first` where these must be equally many."""
    if even and total % processes:
        batch = _filled(batch, first, processes - total % processes)
    share, more = divmod(find_batch_size(batch) or total, processes)
    parts, start = [], 0
    for rank in range(processes):
        bounds = slice(start, start + share + (rank < more))
        part = slice_fn(batch, bounds, rank, processes) if slice_fn else _sliced(batch, bounds)
        real = min(max(total - start, 0), bounds.stop - start)
        parts.append(BatchPart(part, True, find_batch_size(part) or 0, real, total))
        start = bounds.stop
    return parts


def _sliced(batch: Any, bounds: slice) -> Any:
    rows = find_batch_size(batch)

    def is_rows(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) or (isinstance(leaf, list) and len(leaf) == rows and _holds_no_tensor(leaf))

    return recursively_apply(lambda leaf: leaf[bounds] if not _is_scalar(leaf) else leaf, batch, test_type=is_rows)


def _filled(batch: Any, first: Any, missing: int) -> Any:
    """Return `batch` with `missing` more rows, taken from `first`; unchanged if their rows cannot be concatenated."""
    rows = find_batch_size(batch) or 0
    parts = [batch]
    while missing > 0:
        part = _sliced(first, slice(0, missing))
        parts.append(part)
        missing -= find_batch_size(part) or missing
    return _concatenated(parts, rows)


def _concatenated(parts: list[Any], rows: int) -> Any:
    """Return batches as one; the first if their rows cannot be concatenated. `rows` are those of the first."""
    try:
        return _joined(parts, rows)
    except (RuntimeError, TypeError):  # rows of other lengths (padded differently)
        return parts[0]


def _joined(parts: list[Any], rows: int) -> Any:
    first = parts[0]
    if isinstance(first, list) and len(first) == rows and _holds_no_tensor(first):
        return [item for part in parts for item in part]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, dict):
        return type(first)({key: _joined([part[key] for part in parts], rows) for key in first})
    if isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
        return type(first)(_joined([part[i] for part in parts], rows) for i in range(len(first)))
    return concatenate(parts) if first_tensor(first) is not None else first


def _holds_no_tensor(leaf: list[Any]) -> bool:
    return not any(isinstance(item, Tensor) for item in leaf)


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 0


class _Failure:
    """Sent instead of data after an error on process 0."""

    def __init__(self, text: str) -> None:
        self.text = text


class _Placeholder:
    """Shape and dtype of a tensor that is sent separately."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


class DispatchSource(PicklableSource):
    """A source whose data process 0 reads, round by round, sending every process its part.

    Tensors are sent through `group` as bytes of CPU memory; all other objects are pickled.

    Args:
        base: reads the data; iterated over on process 0 only.
        group: a process group for CPU tensors, used only for this.
        num_processes: number of processes.
        process_index: rank of this process.
        split_batches: split each batch into parts instead of distributing whole batches.
        even_batches: fill an incomplete last round with rows of the first, so that all have equally many.
        drop_last: drop an incomplete last round.
        slice_fn: slices a batch: (data, slice, process_index, num_processes) -> part.
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

    def open(self, skip: int) -> Iterator[LoaderStep]:
        if self._index != 0:
            return self._receive()
        stride = 1 if self._split else self._processes
        with self._reporting_failure():
            batches = islice(iter(self.base), skip * stride, None)
            ahead = self._round(batches, stride)
        return self._read(batches, ahead, stride)

    def _read(self, batches: Iterator[Any], ahead: list[Any], stride: int) -> Iterator[LoaderStep]:
        first = ahead
        with self._reporting_failure():
            while ahead:
                group, ahead = ahead, self._round(batches, stride)
                yield self._send(self._parts(group, first), last=not ahead)
        self._scatter([None] * self._processes)

    def _round(self, batches: Iterator[Any], stride: int) -> list[Any]:
        """Read the batches of the next round; none if it is incomplete and dropped."""
        group = list(islice(batches, stride))
        return [] if self._drop_last and len(group) < stride else group

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Send an error in the body to the other processes, which wait for data."""
        try:
            yield
        except Exception as error:
            self._scatter([_Failure(f"{type(error).__name__}: {error}")] * self._processes)
            raise

    def _parts(self, group: list[Any], first: list[Any]) -> list[BatchPart]:
        size = self.base.batch_size or getattr(self.base.batch_sampler, "batch_size", None)
        if self._split:
            return cut_evenly(group[0], first[0], self._processes, self._even, self._slice_fn, size)
        return one_each(group, first, self._processes, self._even, size)

    def _send(self, parts: list[BatchPart], last: bool) -> LoaderStep:
        buffers: list[list[Tensor]] = []
        headers: list[Any] = []
        for part in parts:
            tensors: list[Tensor] = []
            skeleton = recursively_apply(lambda leaf, into=tensors: into.append(leaf) or _Placeholder(leaf), part.batch)
            buffers.append(tensors)
            headers.append((skeleton, LoaderStep(None, last, part.uneven, part.rows, part.real, part.total_real)))
        self._scatter(headers)
        sends = []
        for rank in range(1, self._processes):
            for tensor in buffers[rank]:
                sends.append(dist.isend(_as_bytes(tensor.cpu().contiguous()), rank, group=self._group))
        for work in sends:
            assert work is not None
            work.wait()
        return headers[0][1]._replace(batch=parts[0].batch)

    def _receive(self) -> Iterator[LoaderStep]:
        while (header := self._scatter(None)) is not None:
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

    def _scatter(self, headers: list[Any] | None) -> Any:
        """Return this process's header of those that process 0 gives, one per process."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, headers, src=0, group=self._group)
        return mine[0]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
