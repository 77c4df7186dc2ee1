"""Making shapes equal across processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bigmodel.train.operations.collectives import gather
from bigmodel.train.operations.nested import recursively_apply
from bigmodel.train.state.partial import PartialState


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad every tensor along `dim` to the largest size there is on any process.

    Args:
        tensor: nested tensors, of the same shapes on every process but for `dim`.
        dim: the dimension; tensors with fewer dimensions are left as they are.
        pad_index: the value to pad with.
        pad_first: pad at the beginning.
    """
    if not PartialState().use_distributed:
        return tensor
    return recursively_apply(_pad_one, tensor, dim, pad_index, pad_first, error_on_other_type=True)


def _pad_one(tensor: Tensor, dim: int, pad_index: int, pad_first: bool) -> Tensor:
    if dim >= tensor.ndim or dim < -tensor.ndim:
        return tensor
    size = tensor.shape[dim]
    largest = int(gather(torch.tensor([size], device=tensor.device)).max())
    if largest == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = largest
    padded = tensor.new_full(shape, pad_index)
    padded.narrow(dim, largest - size if pad_first else 0, size).copy_(tensor)
    return padded


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last row of tensors of length `batch_size` until the length divides by `num_processes`."""
    missing = -batch_size % num_processes

    def pad(value: Tensor) -> Tensor:
        if missing == 0 or dim >= value.ndim or value.shape[dim] != batch_size:
            return value
        last = value.narrow(dim, batch_size - 1, 1)
        return torch.cat([value, *[last] * missing], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)
