"""A small training run, the same on any number of processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bigmodel.train import Accelerator, set_seed

GLOBAL_BATCH = 8


class Run:
    """A model with dropout, AdamW, a schedule and a shuffled loader, all prepared.

    Args:
        accelerator: what prepares it.
        samples: length of the dataset.
        dropout: probability; 0 makes runs on one and on two processes comparable.
    """

    def __init__(self, accelerator: Accelerator, samples: int = 48, dropout: float = 0.2, **loader: Any) -> None:
        set_seed(3)
        self.accelerator = accelerator
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        data = TensorDataset(torch.randn(samples, 6), torch.randint(0, 3, (samples,)))
        batches = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True, **loader)
        self.model, self.optimizer, self.schedule, self.loader = accelerator.prepare(net, optimizer, schedule, batches)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Make one step and return the mean loss of all processes."""
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return float(accelerator.reduce(loss.detach(), "mean"))

    def epoch(self, loader: Any = None) -> list[float]:
        """Train one epoch and return its losses."""
        return [self.step(x, y) for x, y in (self.loader if loader is None else loader)]

    def weights(self) -> torch.Tensor:
        """Return all parameters in one vector."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
