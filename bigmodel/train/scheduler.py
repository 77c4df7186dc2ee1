"""The learning-rate scheduler that `prepare` returns: it steps only if its optimizer did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from bigmodel.train.optimizer import AcceleratedOptimizer
from bigmodel.train.state.gradient import GradientState


class AcceleratedScheduler:
    """A scheduler that respects accumulation, skipped steps and the number of processes.

    A schedule is written for one process that reads all batches. In one optimizer step `data_processes` processes read
    as many batches, so the schedule advances by that many; with `split_batches` they share one batch, and it advances
    by one. A `ReduceLROnPlateau` gets each metric once.

    Args:
        scheduler: the user's scheduler.
        optimizers: the prepared optimizers that it belongs to.
        step_with_optimizer: whether the loop calls `step` together with the optimizer's; otherwise each call advances
            the schedule by one.
        split_batches: whether batches are split among processes.
        data_processes: number of processes that read different data.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        data_processes: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = [optimizers] if isinstance(optimizers, AcceleratedOptimizer) else list(optimizers)
        self.split_batches, self.step_with_optimizer = split_batches, step_with_optimizer
        self.gradient_state = GradientState()
        self._moves = 1 if split_batches or isinstance(scheduler, ReduceLROnPlateau) else data_processes

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers made a step."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self._moves):
            # OneCycleLR raises beyond as many steps as it was made for, which several processes reach early.
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the last learning rates."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        """Return the learning rates that the scheduler computes."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Print as the scheduler does."""
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state dict."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)
