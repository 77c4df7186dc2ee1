"""Collective operations on nested tensors and objects. With one process, each returns its input or a copy.

In debug mode (ACCELERATE_DEBUG_MODE) shapes and dtypes are compared across processes before tensors are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bigmodel.errors import TrainError
from bigmodel.train.nested import recursively_apply
from bigmodel.train.state.partial import PartialState

F = TypeVar("F", bound=Callable[..., Any])


class DistributedOperationException(TrainError):
    """The processes called one collective operation with tensors that do not fit together."""


def verify_operation(function: F) -> F:
    """In debug mode, compare shapes and dtypes across processes before `function(tensor, ...)` runs."""

    @wraps(function)
    def verified(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.debug and state.use_distributed:
            _compare(function.__name__, tensor, state, _kind)
        return function(tensor, *args, **kwargs)

    return verified  # type: ignore[return-value]


def _kind(tensor: Tensor) -> Any:
    """Return what the tensors of all processes must have in common."""
    return list(tensor.shape), str(tensor.dtype), tensor.device.type


def _compare(name: str, tensor: Any, state: PartialState, kind: Callable[[Tensor], Any]) -> None:
    mine = repr(recursively_apply(kind, tensor))
    everyone: list[Any] = [None] * state.num_processes
    dist.all_gather_object(everyone, mine)
    if len(set(everyone)) > 1:
        listing = "\n".join(f"  process {rank}: {shapes}" for rank, shapes in enumerate(everyone))
        raise DistributedOperationException(
            f"{name} was called with tensors that differ between processes:\n{listing}\n"
            "Make them equal first, for example with pad_across_processes"
        )


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad every tensor along `dim` to the largest size on any process.

    Args:
        tensor: nested tensors, of the same shapes on every process except along `dim`.
        dim: the dimension; tensors with fewer dimensions are not changed.
        pad_index: the value to pad with.
        pad_first: pad at the beginning.
    """
    state = PartialState()
    if not state.use_distributed:
        return tensor
    if state.debug:
        _compare("pad_across_processes", tensor, state, lambda leaf: (leaf.ndim, str(leaf.dtype)))
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


# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@verify_operation
def gather(tensor: Any) -> Any:
    """Return every process's tensors concatenated along the first dimension, in the order of ranks.

    Args:
        tensor: nested tensors, of the same shapes on every process. A scalar gives a vector of `num_processes`.
    """
    if not PartialState().use_distributed:
        return tensor
    return recursively_apply(_gather_one, tensor, error_on_other_type=True)


def _gather_one(tensor: Tensor) -> Tensor:
    state = PartialState()
    tensor = tensor.detach()
    part = (tensor.reshape(1) if tensor.ndim == 0 else tensor).contiguous()
    whole = torch.empty((state.num_processes * part.shape[0], *part.shape[1:]), dtype=part.dtype, device=part.device)
    # As bytes: a gather only moves data, and backends do not support every dtype.
    _all_gather(whole.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8))
    return whole


def gather_uneven(tensor: Tensor) -> Tensor:
    """Return every process's tensor concatenated along the first dimension, whose lengths may differ."""
    state = PartialState()
    if not state.use_distributed:
        return tensor
    lengths = _gather_one(torch.tensor([tensor.shape[0]], device=tensor.device)).tolist()
    longest = max(lengths)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    whole = _gather_one(padded)
    parts = [whole[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]
    return torch.cat(parts)


def gather_object(object: Any) -> Any:
    """Return the concatenation of every process's list of picklable objects."""
    state = PartialState()
    if not state.use_distributed:
        return object
    everyone: list[Any] = [None] * state.num_processes
    dist.all_gather_object(everyone, object)
    return [item for part in everyone for item in part]


@verify_operation
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite the tensors on every process by those of `from_process`, and return them."""
    if not PartialState().use_distributed:
        return tensor
    return recursively_apply(_broadcast_one, tensor, from_process, error_on_other_type=True)


def _broadcast_one(tensor: Tensor, from_process: int) -> Tensor:
    if tensor.is_contiguous():
        dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=from_process)
    else:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense.view(-1).view(torch.uint8), src=from_process)
        with torch.no_grad():
            tensor.copy_(dense)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the members of the list on every process by those of `from_process`, and return it."""
    if PartialState().use_distributed:
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


@verify_operation
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the sum, mean or maximum over processes of every tensor, times `scale`. The arguments are not changed.

    With one process the result is a copy, through which gradients flow.

    Args:
        tensor: nested tensors, of the same shapes on every process.
        reduction: "sum", "mean", "max" or "none", which copies each process's own tensors.

    Raises:
        TrainError: another reduction.
    """
    if reduction not in ("sum", "mean", "max", "none"):
        raise TrainError(f"unknown reduction {reduction!r}; choose 'sum', 'mean', 'max' or 'none'")
    return recursively_apply(_reduce_one, tensor, reduction, scale, error_on_other_type=True)


def _reduce_one(tensor: Tensor, reduction: str, scale: float) -> Tensor:
    state = PartialState()
    if reduction == "none":
        return tensor.clone()
    if not state.use_distributed:
        return tensor.clone() if scale == 1.0 else tensor * scale
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
    if reduction == "mean":
        total = total / state.num_processes
    return total if scale == 1.0 else total * scale
