"""Stand-ins for an optimizer and a scheduler that the DeepSpeed configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class DummyOptim:
    """Takes the optimizer's place in `prepare` when the DeepSpeed configuration has an `optimizer` section.

    Args:
        params: parameters or parameter groups.
        lr, weight_decay: fill "auto" in that section; other keyword arguments do so under their own names.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Takes the scheduler's place in `prepare` when the DeepSpeed configuration has a `scheduler` section.

    Args:
        optimizer: the optimizer or its stand-in.
        total_num_steps, warmup_num_steps: optimizer steps; fill "auto" in that section.
        lr_scheduler_callable: makes the scheduler from the optimizer, instead of the section.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


class EngineScheduler:
    """A DeepSpeed engine's scheduler, which the engine steps by itself."""

    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler = scheduler
        self.optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine has stepped its scheduler with its optimizer."""

    def get_last_lr(self) -> Any:
        """Learning rates of the last step."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.scheduler.load_state_dict(state)
