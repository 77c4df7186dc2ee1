"""Loss scaling for fp16 when gradients are shards: an overflow on one rank skips the step on all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from bigmodel.train.strategies.clipping import local_part


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for distributed tensors.

    Args:
        device: the process group's device, over which ranks tell each other of overflows.
    """

    def __init__(self, device: torch.device, **kwargs: Any) -> None:
        super().__init__(device.type, **kwargs)
        self._ranks_device = device

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide this rank's gradients by the scale and learn whether any rank's overflowed."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        found: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        local = [flag.to(self._ranks_device) for flag in found.values()]
        anywhere = torch.stack(local).max() if local else torch.zeros((), device=self._ranks_device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        for flag in found.values():
            flag.copy_(anywhere)
        # A rank whose shards are all empty still has to take part in skipping.
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
