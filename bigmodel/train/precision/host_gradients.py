"""Unscaling of gradients that lie in host memory, as those of offloaded weights do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler


class HostGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for gradients on an accelerator, on the host, or on both.

    PyTorch's own copies the scale to a gradient's device without waiting for the copy: on the host it is then used
    before it has arrived.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        flags: dict[torch.device, Tensor] = {}
        for device in dict.fromkeys(parameter.grad.device for parameter in parameters):
            here = [parameter for parameter in parameters if parameter.grad.device == device]
            part: Any = SimpleNamespace(param_groups=[{"params": here}])
            flags |= super()._unscale_grads_(part, inv_scale.to(device), found_inf.to(device), allow_fp16)
        return flags
