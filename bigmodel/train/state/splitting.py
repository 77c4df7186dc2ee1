"""Which part of a collection belongs to which process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bigmodel.errors import TrainError
from bigmodel.train.operations.nested import rebuild_mapping


def share_bounds(length: int, num_processes: int, process_index: int) -> tuple[int, int]:
    """Return (start, end) of a process's share: contiguous, sizes differing by at most one, larger ones first."""
    size, extra = divmod(length, num_processes)
    start = process_index * size + min(process_index, extra)
    return start, start + size + (process_index < extra)


def process_share(inputs: Any, num_processes: int, process_index: int, apply_padding: bool = False) -> Any:
    """Return a process's share of a list, tuple, tensor, mapping of such of one length, or `datasets.Dataset`.

    With `apply_padding`, shares are filled up to one length with the last element of `inputs`.

    Raises:
        TrainError: a dict whose values differ in length, or padding of a collection of another type.
    """
    if num_processes == 1:
        return inputs
    length = _length(inputs)
    start, end = share_bounds(length, num_processes, process_index)
    missing = -(-length // num_processes) - (end - start) if apply_padding else 0
    return _take(inputs, start, end, missing)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return len(inputs)
    lengths = {name: len(value) for name, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise TrainError(f"the values of a dict split between processes must have one length, not {lengths}")
    return next(iter(lengths.values()), 0)


def _take(inputs: Any, start: int, end: int, missing: int) -> Any:
    if isinstance(inputs, Mapping):
        shares = {name: _take(value, start, end, missing) for name, value in inputs.items()}
        return rebuild_mapping(inputs, shares)
    if isinstance(inputs, torch.Tensor):
        part = inputs[start:end]
        return torch.cat([part, *[inputs[-1:]] * missing]) if missing else part
    if isinstance(inputs, (list, tuple)):
        return type(inputs)([*inputs[start:end], *list(inputs[-1:]) * missing])
    if hasattr(inputs, "select"):
        return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
    if missing:
        raise TrainError(f"apply_padding does not know how to repeat elements of a {type(inputs).__name__}")
    return inputs[start:end]
