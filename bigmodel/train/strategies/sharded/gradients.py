"""Gradients sharded over ranks: their norm, clipping, and overflow detection in fp16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


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
    """Return the norm of all `gradients` together, over all ranks that have a part of them."""
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
    """Return this rank's part of a distributed tensor; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    local = local_part(gradient).detach()
    if local.numel() == 0:
        return torch.zeros((), device=local.device)
    return torch.linalg.vector_norm(local, norm_type, dtype=torch.float32)


def _sharded_over(gradient: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh of `gradient` and its dimensions along which ranks have different parts."""
    if not isinstance(gradient, DTensor):
        return None, ()
    placements = enumerate(gradient.placements)
    sharded = (i for i, placement in placements if not placement.is_replicate() and not placement.is_partial())
    return gradient.device_mesh, tuple(sharded)


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for distributed tensors.

    Args:
        device: the process group's device, for exchanging overflow flags.
    """

    def __init__(self, device: torch.device, **kwargs: Any) -> None:
        super().__init__(device.type, **kwargs)
        self._ranks_device = device

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide this rank's gradients by the scale, and reduce the overflow flags of all ranks."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        found: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        local = [flag.to(self._ranks_device) for flag in found.values()]
        anywhere = torch.stack(local).max() if local else torch.zeros((), device=self._ranks_device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        for flag in found.values():
            flag.copy_(anywhere)
        # A rank whose shards are all empty must also skip the step.
        found.setdefault(self._ranks_device, anywhere)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags: dict[torch.device, Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                local = local_part(parameter.grad)
                device = local.device
                flag = flags.setdefault(device, found_inf.to(device, copy=True))
                torch._amp_foreach_non_finite_check_and_unscale_([local], flag, inv_scale.to(device))
        return flags
