"""The names of ``accelerate.optimizer``: the wrapped optimizer."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from bigmodel.train import AcceleratedOptimizer as AcceleratedOptimizer
from bigmodel.train.nested import honor_type


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Return an optimizer's state with every tensor in its lists, tuples and dicts on `device`."""
    if isinstance(state, (list, tuple)):
        return honor_type(state, (move_to_device(each, device) for each in state))
    if isinstance(state, dict):
        return type(state)({name: move_to_device(each, device) for name, each in state.items()})
    return state.to(device) if isinstance(state, torch.Tensor) else state


def patch_optimizer_step(accelerated_optimizer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's ``step`` that notes at `accelerated_optimizer` that it was called."""

    @wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True
        return method(*args, **kwargs)

    return step
