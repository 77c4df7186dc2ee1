"""Dividing what process 0 has read among the processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigmodel.errors import TrainError
from bigmodel.train.operations.nested import concatenate, find_batch_size, find_tensors, recursively_apply


class Part(NamedTuple):
    """One process's part of a round; see `Step` for the fields."""

    batch: Any
    uneven: bool
    rows: int
    real: int
    total_real: int


def one_each(
    group: list[Any], first: list[Any], processes: int, even: bool, drop_last: bool, size: int | None = None
) -> list[Part]:
    """Give each process one batch of `group`; fill what is missing from `first`, or leave the round out.

    `size` is the number of rows of a whole batch, that of the first one by default.
    """
    rows = [find_batch_size(batch) or 1 for batch in group]
    size, total = size or find_batch_size(first[0]) or 1, sum(rows)
    if len(group) == processes and set(rows) == {size}:
        return [Part(batch, False, row, row, total) for batch, row in zip(group, rows, strict=True)]
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
        parts.append(Part(batch, True, find_batch_size(batch) or 1, real, total))
    return parts


def cut_evenly(
    batch: Any,
    first: Any,
    processes: int,
    even: bool,
    slice_fn: Callable[..., Any] | None = None,
    size: int | None = None,
) -> list[Part]:
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
        parts.append(Part(part, total < whole, find_batch_size(part) or 0, real, total))
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
    return concatenate(pieces) if next(iter(find_tensors(first)), None) is not None else first


def _holds_no_tensor(leaf: list[Any]) -> bool:
    return not any(isinstance(item, Tensor) for item in leaf)


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 0
