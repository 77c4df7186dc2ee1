"""A small model trained by FSDP2, and its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bigmodel import FullyShardedDataParallelPlugin
from bigmodel.train import Accelerator


def sharded(**options: Any) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0)


def full(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights on the main process, {} on the other."""
    return accelerator.get_state_dict(model)
