"""Local SGD: processes train independently and average their parameters periodically."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train.accelerator.core import Accelerator


class LocalSGD:
    """A context in which gradients stay local and parameters are averaged every `local_sgd_steps` calls of `step()`.

    Call `step()` after each batch: batches that only accumulate gradients count, as in accelerate. At the end of the
    context parameters are averaged once more.

    Args:
        accelerator: the Accelerator that prepared `model`.
        model: the prepared model.
        local_sgd_steps: batches between two averages.
        enabled: False makes the context do nothing.

    Raises:
        TrainError: the processes do not each have the whole model.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise TrainError(f"local_sgd_steps is {local_sgd_steps}; give 1 or more")
        if enabled and not accelerator.strategy.keeps_whole_models:
            raise TrainError(
                f"LocalSGD averages whole models, but {accelerator.distributed_type.value} splits them: "
                "use data parallelism"
            )
        self.accelerator, self.model = accelerator, model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._no_sync = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._no_sync.close()
        if self.enabled and kind is None:
            self._average()

    def step(self) -> None:
        """Count a batch; after every `local_sgd_steps` of them, average the parameters."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(self.accelerator.num_processes)
