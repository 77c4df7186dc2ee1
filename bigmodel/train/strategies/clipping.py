"""The norm of gradients that lie in shards on several ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Scale gradients, plain or sharded, so that their total norm is at most `max_norm`.

    Args:
        device: where norms are exchanged between ranks (the process group's device).

    Returns:
        The norm before, a scalar on `device`: (sum over all elements of |g|^p)^(1/p), or the largest |g| for p = inf.
        The same on every rank.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = total_norm(gradients, norm_type, device)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        local = local_part(gradient)
        local.mul_(scale.to(local.device, local.dtype))
    return total


def total_norm(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all `gradients` together, over all ranks that hold a part of them."""
    infinite = norm_type == float("inf")
    by_shards: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        by_shards.setdefault(_sharded_over(gradient), []).append(_norm(gradient, norm_type).to(device))
    parts: list[Tensor] = []
    for (mesh, dimensions), norms in by_shards.items():
        stacked = torch.stack(norms)
        part = stacked.max() if infinite else stacked.pow(norm_type).sum()
        for dimension in dimensions:
            operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(part, operation, group=mesh.get_group(dimension))
        parts.append(part)
    if not parts:
        return torch.zeros((), device=device)
    everything = torch.stack(parts)
    return everything.max() if infinite else everything.sum().pow(1.0 / norm_type)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    local = local_part(gradient).detach()
    if local.numel() == 0:
        return torch.zeros((), device=local.device)
    return torch.linalg.vector_norm(local, norm_type, dtype=torch.float32)


def _sharded_over(gradient: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The mesh of `gradient` and the dimensions of it along which ranks hold different parts."""
    if not isinstance(gradient, DTensor):
        return None, ()
    placements = enumerate(gradient.placements)
    sharded = (i for i, placement in placements if not placement.is_replicate() and not placement.is_partial())
    return gradient.device_mesh, tuple(sharded)
