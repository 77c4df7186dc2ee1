"""Operations on tensors and objects across processes. With one process each gives back what it was given, or a copy."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigmodel.errors import TrainError
from bigmodel.train.operations.checks import verify_operation
from bigmodel.train.operations.nested import recursively_apply
from bigmodel.train.state.partial import PartialState

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
    # As bytes: a gather only moves them, and backends do not know every dtype.
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
    """Return the sum or mean over processes of every tensor, times `scale`. The tensors given are left as they are.

    With one process the result is a copy, and keeps its place in autograd's graph.

    Args:
        tensor: nested tensors, of the same shapes on every process.
        reduction: "sum", "mean" or "none", which copies each process's own tensors.

    Raises:
        TrainError: another reduction.
    """
    if reduction not in ("sum", "mean", "none"):
        raise TrainError(f"unknown reduction {reduction!r}; choose 'sum', 'mean' or 'none'")
    return recursively_apply(_reduce_one, tensor, reduction, scale, error_on_other_type=True)


def _reduce_one(tensor: Tensor, reduction: str, scale: float) -> Tensor:
    state = PartialState()
    if reduction == "none":
        return tensor.clone()
    if not state.use_distributed:
        return tensor.clone() if scale == 1.0 else tensor * scale
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    if reduction == "mean":
        total = total / state.num_processes
    return total if scale == 1.0 else total * scale
